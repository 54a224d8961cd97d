"""Compare the speed of our steps with Hugging Face and fairseq, after checking that their results are equal."""
