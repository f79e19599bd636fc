"""What authors of models, backends and algorithms need to test theirs."""
