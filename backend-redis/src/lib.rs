//! leasehold on Redis and Valkey.
