"""What packages of public benchmarks share: rows from the hub or a file, answers taken from replies, their judging."""
