//! What the two ends of a link may agree on beyond what every version speaks. Names travel with a join: the attention rank
//! says which it knows, the FFN rank answers with those that it knows too, and a rank of an earlier version with none.
use super::LinkKind;
use crate::frame::Checksum;

/// Bodies are summed by [`Checksum::Sum64`] on links of the two services' own: `tcp` and `shm`. Frames in a gRPC stream are
/// for clients in any language, and have CRC-32C. (The feature `sum64` was another sum of as many bits: no version that knows
/// this one agrees to it.)
const SUM64: &str = "sum64-aes";

/// What this process knows and gains by. Where the CPU does no rounds of AES by itself, CRC-32C is the faster one.
pub fn offered() -> Vec<String> {
    afd_ffi::sum64::is_fast().then(|| SUM64.to_owned()).into_iter().collect()
}

/// How the bodies of a link of `kind` are summed, by the features that were agreed.
pub fn checksum(kind: LinkKind, agreed: &[String]) -> Checksum {
    let own = matches!(kind, LinkKind::Tcp | LinkKind::Shm);
    if own && agreed.iter().any(|name| name == SUM64) { Checksum::Sum64 } else { Checksum::Crc32c }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_of_our_own_have_another_checksum_and_only_where_it_was_agreed() {
        let agreed = ["profile".to_owned(), SUM64.to_owned()];
        for kind in [LinkKind::Tcp, LinkKind::Shm] {
            assert_eq!(checksum(kind, &agreed), Checksum::Sum64);
            assert_eq!(checksum(kind, &agreed[..1]), Checksum::Crc32c);
            assert_eq!(checksum(kind, &[]), Checksum::Crc32c);
        }
        assert_eq!(checksum(LinkKind::Inline, &agreed), Checksum::Crc32c);
    }
}
