"""Code specific to fine-tuning: learner, selection of the best weights, active vocabulary."""
