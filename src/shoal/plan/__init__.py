"""What a training run would need: memory, step time and the best layout, computed from formulas."""
