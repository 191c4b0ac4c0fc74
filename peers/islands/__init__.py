"""Islands of a run: the directory as each sees it, their meetings, trainers for all of them, and plans."""
