"""For `warm_python`: does once what scripts do at their first `prepare`: imports, dialects of settings, torch's operators."""

from paceline.testing.ranks import warm_up

warm_up()
