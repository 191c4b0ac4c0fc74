"""The health of a run, from what its peers say: checked, added up, and put into words."""
