"""What Prometheus scrapes: figures of the backend, read when asked, and figures of requests, one look at each."""
