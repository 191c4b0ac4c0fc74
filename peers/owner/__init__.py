"""What the owner of a machine wants of the peers on it: pause, resume, limits, and whether they are well."""
