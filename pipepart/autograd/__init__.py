"""Parts of one backward: graphs cut at stage borders, and backwards split into input and weight gradients."""
