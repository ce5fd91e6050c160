"""How models write tool calls and reasoning: `table` has the markers, the others read what stands between them."""
