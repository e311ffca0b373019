//! Named locks, leases, claims and dedupe between copies of a service: traits, guards, engine and the memory backend.
