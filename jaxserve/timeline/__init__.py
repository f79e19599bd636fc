"""What happened when: spans of the host, lanes of the device, written as a trace or drawn."""
