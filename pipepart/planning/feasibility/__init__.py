"""Why no plan fits, and which changes would make one fit."""
