//! Names of full blocks: each is the hash of its tokens and of the name of the block before it, so that equal names mean
//! equal tokens from the very start.
use sha2::{Digest, Sha256};

/// Name of a full block. Half a SHA-256: prompts come from strangers, and a collision would show one the other's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefixKey([u8; 16]);

impl PrefixKey {
    fn after(parent: Option<&Self>, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(parent.map_or([0; 16], |parent| parent.0));
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        let mut key = [0; 16];
        key.copy_from_slice(&hash.finalize()[..16]);
        Self(key)
    }
}

/// The names of a sequence's full blocks, computed once as it grows.
#[derive(Debug, Default)]
pub struct PrefixChain {
    keys: Vec<PrefixKey>,
}

impl PrefixChain {
    /// Names for every full block of `tokens`, whose beginning has not changed since the last call.
    pub fn extend(&mut self, tokens: &[u32], block_size: usize) -> &[PrefixKey] {
        for block in tokens.chunks_exact(block_size).skip(self.keys.len()) {
            self.keys.push(PrefixKey::after(self.keys.last(), block));
        }
        &self.keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_covers_everything_before_it() {
        let of = |tokens: &[u32]| PrefixChain::default().extend(tokens, 2).to_vec();
        let (a, b) = (of(&[1, 2, 3, 4, 5]), of(&[9, 2, 3, 4]));
        assert_eq!(a.len(), 2);
        assert_eq!(a, of(&[1, 2, 3, 4]));
        assert_ne!(a[0], b[0]);
        assert_ne!(a[1], b[1], "same tokens after another beginning");
    }

    #[test]
    fn growing_gives_the_same_names_as_starting_over() {
        let tokens: Vec<u32> = (0..20).collect();
        let mut chain = PrefixChain::default();
        for end in 0..=tokens.len() {
            chain.extend(&tokens[..end], 4);
        }
        assert_eq!(chain.keys, PrefixChain::default().extend(&tokens, 4));
    }
}
