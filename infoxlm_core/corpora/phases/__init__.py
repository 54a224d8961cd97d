"""The phases of preparation: pure functions of a job and a number, which exchange files and run on any machine."""
