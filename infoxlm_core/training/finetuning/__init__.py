"""Parts that only fine-tuning needs: its learner, the choice of the best checkpoint, the active vocabulary."""
