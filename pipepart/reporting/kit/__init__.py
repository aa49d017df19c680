"""Tables, figures and the console that all reports share."""
