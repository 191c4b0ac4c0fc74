"""Work that is counted: what peers sign of their answers, and what trainers vouch for."""
