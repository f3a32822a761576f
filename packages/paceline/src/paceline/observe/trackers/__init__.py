"""One file a tracker."""
