"""Islands of a run: the directory as each sees it, their meetings, and trainers for all of them."""
