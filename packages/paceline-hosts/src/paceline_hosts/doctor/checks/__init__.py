"""The checks of `paceline doctor`: a file with `CHECK` each, which judges facts and collects none."""
