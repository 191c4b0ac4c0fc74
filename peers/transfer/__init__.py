"""State that travels: whole stages, gradients of single steps, and the catalogue of saved versions."""
