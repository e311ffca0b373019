//! Patterns that services need, written once over the traits, so that each works on every backend.
