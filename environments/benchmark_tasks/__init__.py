"""What the packages of public benchmarks have in common: rows from the hub or a file, answers taken from replies, and how they are judged."""
