"""From the teacher's weights to a trainable student: pruning, LoRA, EMA, its engine."""
