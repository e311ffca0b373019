//! [`hashtext`]: the server's own hash of a text, to share locks with programs that use it.

/// What `hashtext(key)` gives on the server, for text of a deterministic collation (the default).
///
/// Many programs lock with `pg_advisory_lock(hashtext('some key'))`. With this as the
/// [`key_hash`](crate::PostgresBuilder::key_hash) a handle shares their locks:
///
/// ```
/// use leasehold_postgres::{PostgresBackend, hashtext};
///
/// let builder = PostgresBackend::builder().key_hash(|_kind, key| hashtext(key.as_str()).into());
/// # drop(builder);
/// assert_eq!(hashtext("migrations"), 331_260_518);
/// ```
///
/// It has 32 bits only: among 77,000 keys, two are likely to share a lock. Use it where you must.
/// It is Bob Jenkins' `lookup3` as the server has it (`hash_bytes`), which has not changed since
/// version 8.4; it is not part of the server's documented interface.
pub fn hashtext(text: &str) -> i32 {
    let bytes = text.as_bytes();
    let seed = 0x9e37_79b9_u32.wrapping_add(bytes.len() as u32).wrapping_add(3_923_095);
    let mut state = [seed; 3];
    let mut blocks = bytes.chunks_exact(12);
    for block in &mut blocks {
        for (word, part) in state.iter_mut().zip(block.chunks_exact(4)) {
            *word = word.wrapping_add(little_endian(part));
        }
        mix(&mut state);
    }
    let rest = blocks.remainder();
    let (head, tail) = rest.split_at(rest.len().min(8));
    for (word, part) in state.iter_mut().zip(head.chunks(4)) {
        *word = word.wrapping_add(little_endian(part));
    }
    // the lowest byte of the third word is kept for the length: its bytes are moved up by one
    let shifted: Vec<u8> = std::iter::once(0).chain(tail.iter().copied()).collect();
    state[2] = state[2].wrapping_add(little_endian(&shifted));
    last_mix(&mut state);
    state[2].cast_signed()
}

fn little_endian(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |word, byte| (word << 8) | u32::from(*byte))
}

fn mix(state: &mut [u32; 3]) {
    let [mut a, mut b, mut c] = *state;
    a = a.wrapping_sub(c) ^ c.rotate_left(4);
    c = c.wrapping_add(b);
    b = b.wrapping_sub(a) ^ a.rotate_left(6);
    a = a.wrapping_add(c);
    c = c.wrapping_sub(b) ^ b.rotate_left(8);
    b = b.wrapping_add(a);
    a = a.wrapping_sub(c) ^ c.rotate_left(16);
    c = c.wrapping_add(b);
    b = b.wrapping_sub(a) ^ a.rotate_left(19);
    a = a.wrapping_add(c);
    c = c.wrapping_sub(b) ^ b.rotate_left(4);
    b = b.wrapping_add(a);
    *state = [a, b, c];
}

fn last_mix(state: &mut [u32; 3]) {
    let [mut a, mut b, mut c] = *state;
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    c = (c ^ b).wrapping_sub(b.rotate_left(24));
    *state = [a, b, c];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gives_what_the_server_gave() {
        for (text, hash) in [
            ("migrations", 331_260_518),
            ("", -1_477_818_771),
            ("a", 1_075_015_857),
            ("abcdefgh", -1_960_928_205),
            ("abcdefghi", -92_131_489),
            ("abcdefghijkl", -1_586_087_212),
            ("abcdefghijklmnopqrstuvwxyz", 167_831_483),
            ("größe", -44_224_822),
        ] {
            assert_eq!(hashtext(text), hash, "{text}");
        }
    }
}
