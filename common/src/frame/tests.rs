//! What is encoded is decoded, and nothing else is.
use proptest::prelude::*;

use super::checksum::extend_anywhere;
use super::*;

const LIMITS: FrameLimits = FrameLimits { max_rows: 64, max_body_bytes: 1 << 20 };

fn any_header() -> impl Strategy<Value = FrameHeader> {
    let kinds = prop_oneof![Just(FrameKind::Dispatch), Just(FrameKind::Combine)];
    let dtypes = prop_oneof![Just(RowType::F32), Just(RowType::Bf16)];
    let sides = prop_oneof![
        Just(SideKind::None),
        Just(SideKind::RouterLogits),
        Just(SideKind::TopK),
        Just(SideKind::InputIds)
    ];
    let ids = (any::<u64>(), any::<u64>(), any::<u16>(), any::<u8>());
    (kinds, dtypes, sides, ids, 0..=64u32, 0..2048u32, 0..64u32).prop_map(
        |(kind, dtype, side, (epoch, step, layer, stage), rows, columns, side_columns)| {
            let hop = FrameHeader::key(step, layer, stage);
            let epoch = Epoch(epoch);
            let mut header =
                FrameHeader { kind, dtype, side, epoch, hop, rows, columns, side_columns, body_bytes: 0 };
            header.body_bytes = header.expected_body_bytes().unwrap() as u32;
            header
        },
    )
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(header in any_header(), crc in any::<u32>()) {
        prop_assert_eq!(FrameHeader::decode(&header.encode(crc), &LIMITS), Ok((header, crc)));
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_noticed(header in any_header(), crc in any::<u32>()) {
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header.encode(crc);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(FrameHeader::decode(&bytes, &LIMITS).is_err(), "bit {}", bit);
        }
    }

    #[test]
    fn arbitrary_bytes_never_pass_and_never_panic(bytes in any::<[u8; HEADER_BYTES]>()) {
        prop_assert!(FrameHeader::decode(&bytes, &LIMITS).is_err());
    }

    #[test]
    fn checksum_of_parts_is_that_of_the_whole(body in prop::collection::vec(any::<u8>(), 0..700), at in 0..700usize) {
        let (left, right) = body.split_at(at.min(body.len()));
        prop_assert_eq!(body_crc(&[left, right]), body_crc(&[&body]));
        prop_assert_eq!(extend_anywhere(extend_anywhere(0, left), right), body_crc(&[&body]));
        prop_assert_eq!(verify_body(&body, body_crc(&[left, right])), Ok(()));
    }
}

#[test]
fn checksum_is_crc32c() {
    assert_eq!(body_crc(&[b"123456789"]), 0xe306_9283);
    assert_eq!(body_crc(&[]), 0);
}

#[test]
fn numbers_of_a_peer_are_refused_before_they_size_anything() {
    let header = FrameHeader {
        kind: FrameKind::Dispatch,
        dtype: RowType::F32,
        side: SideKind::None,
        epoch: Epoch(1),
        hop: FrameHeader::key(1, 2, 0),
        rows: 2,
        columns: 3,
        side_columns: 0,
        body_bytes: 24,
    };
    let decode = |header: FrameHeader| FrameHeader::decode(&header.encode(0), &LIMITS).map(|_| ());
    assert_eq!(decode(header), Ok(()));
    let rows = decode(FrameHeader { rows: 65, ..header });
    assert_eq!(rows, Err(FrameError::OverLimit { field: "rows", found: 65, limit: 64 }));
    let size = decode(FrameHeader { body_bytes: 25, ..header });
    assert_eq!(size, Err(FrameError::BodySize { found: 25, expected: 24 }));
    let huge = decode(FrameHeader { body_bytes: u32::MAX, ..header });
    assert!(matches!(huge, Err(FrameError::OverLimit { field: "body_bytes", .. })));
    let text = decode(FrameHeader { kind: FrameKind::Error, body_bytes: MAX_TEXT_BYTES + 1, ..header });
    assert!(matches!(text, Err(FrameError::OverLimit { .. })));
    let mut flags = header.encode(0);
    flags[7] = 1;
    let crc = crc32c(&flags[..60]);
    flags[60..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(FrameHeader::decode(&flags, &LIMITS), Err(FrameError::Unknown { field: "flags", value: 1 }));
}
