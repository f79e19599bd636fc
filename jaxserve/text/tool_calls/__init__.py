"""Tool calls in the text of an output, by the notations models have been trained on."""
