"""Several targets in one fleet: their names, and the workers that fit them."""
