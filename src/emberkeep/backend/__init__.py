"""Who answers: takes a request, yields events."""
