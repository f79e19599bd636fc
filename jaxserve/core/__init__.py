"""The nouns every other layer shares: requests, sampling parameters, sequences, plans, configuration, errors."""
