"""The schema that HTTP, the library, the command line and backends share: requests, messages, answers, errors."""
