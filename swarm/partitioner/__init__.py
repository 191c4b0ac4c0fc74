"""Where to cut a model into stages, and what each operator costs."""
