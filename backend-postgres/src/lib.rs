//! leasehold on PostgreSQL.
