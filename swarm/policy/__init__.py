"""Which peers are called, and for how long, and which move: decisions that cost time only. Pure: no clock."""
