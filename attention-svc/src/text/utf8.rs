//! Bytes that arrive in arbitrary portions become text without ever showing half a character.

/// Incremental form of [`String::from_utf8_lossy`]: the concatenated output is the same, whatever the portions.
#[derive(Debug, Default)]
pub(super) struct Utf8Stream {
    /// The beginning of a character, at most three bytes.
    partial: Vec<u8>,
}

impl Utf8Stream {
    /// Takes more bytes, returns the text they complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> String {
        self.partial.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.partial.len());
        let mut rest = self.partial.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(length) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[length..];
                        }
                        None => {
                            rest = after;
                            break;
                        }
                    }
                }
            }
        }
        self.partial = rest.to_vec();
        text
    }

    /// No more bytes will come: an unfinished character becomes U+FFFD.
    pub(super) fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.partial)).into_owned()
    }
}

/// Bytes of a byte-level token. One with characters outside the alphabet (an added token) is its own text.
pub(super) fn byte_level_bytes(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(byte_level_byte)
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte that a character of a byte-level vocabulary stands for: GPT-2's table, in which printable bytes are
/// themselves and the 68 others are U+0100 and up, in order.
pub(super) fn byte_level_byte(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u8::try_from(code).ok(),
        0x100..=0x143 => {
            let index = u8::try_from(code - 0x100).ok()?;
            Some(match index {
                0..=0x20 => index,
                0x21..=0x42 => 0x7f + (index - 0x21),
                _ => 0xad,
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_lossy_conversion_whatever_the_portions(
            portions in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..5),
                    "\\PC{0,3}".prop_map(|s| s.into_bytes()),
                    prop::sample::select(vec![vec![0xf0, 0x9f], vec![0x98, 0x80], vec![0xe4, 0xbd], vec![0xa0]]),
                ],
                0..12,
            )
        ) {
            let mut stream = Utf8Stream::default();
            let mut text: String = portions.iter().map(|bytes| stream.push(bytes)).collect();
            text.push_str(&stream.finish());
            let whole = portions.concat();
            prop_assert_eq!(text, String::from_utf8_lossy(&whole).into_owned());
        }
    }

    #[test]
    fn the_byte_level_table_is_a_bijection() {
        let mut bytes: Vec<u8> = (0..0x144).filter_map(char::from_u32).filter_map(byte_level_byte).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_level_byte('Ġ'), Some(b' '));
        assert_eq!(byte_level_byte('Ċ'), Some(b'\n'));
        assert_eq!(byte_level_byte('｜'), None);
    }
}
