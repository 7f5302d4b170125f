//! What is encoded is decoded, and nothing else is.
use proptest::prelude::*;

use super::checksum::extend_anywhere;
use super::*;

const LIMITS: FrameLimits = FrameLimits { max_rows: 64, max_body_bytes: 1 << 20, checksum: Checksum::Crc32c };
const SUMMED: FrameLimits = FrameLimits { checksum: Checksum::Sum64, ..LIMITS };

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

/// How a body may be summed, and what is agreed then.
fn any_sum() -> impl Strategy<Value = (Option<BodySum>, FrameLimits)> {
    prop_oneof![
        any::<u32>().prop_map(|crc| (Some(BodySum::Crc32c(crc)), LIMITS)),
        any::<u64>().prop_map(|sum| (Some(BodySum::Sum64(sum)), SUMMED)),
        Just((None, SUMMED)),
    ]
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(header in any_header(), (sum, limits) in any_sum()) {
        prop_assert_eq!(FrameHeader::decode(&header.encoded(sum), &limits), Ok((header, sum)));
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_noticed(header in any_header(), (sum, limits) in any_sum()) {
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header.encoded(sum);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(FrameHeader::decode(&bytes, &limits).is_err(), "bit {}", bit);
        }
    }

    #[test]
    fn arbitrary_bytes_never_pass_and_never_panic(bytes in any::<[u8; HEADER_BYTES]>()) {
        prop_assert!(FrameHeader::decode(&bytes, &LIMITS).is_err());
        prop_assert!(FrameHeader::decode(&bytes, &SUMMED).is_err());
    }

    #[test]
    fn checksum_of_parts_is_that_of_the_whole(body in prop::collection::vec(any::<u8>(), 0..700), at in 0..700usize) {
        let (left, right) = body.split_at(at.min(body.len()));
        for checksum in [Checksum::Crc32c, Checksum::Sum64] {
            let sum = body_sum(checksum, &[left, right]);
            prop_assert_eq!(sum, body_sum(checksum, &[&body]));
            prop_assert_eq!(verify_body(&body, sum), Ok(()));
        }
        prop_assert_eq!(extend_anywhere(extend_anywhere(0, left), right), crc32c(&body));
    }

    #[test]
    fn a_body_is_verified_by_the_sum_it_came_with(body in prop::collection::vec(any::<u8>(), 1..300), at: usize) {
        for checksum in [Checksum::Crc32c, Checksum::Sum64] {
            let (sum, mut damaged) = (body_sum(checksum, &[&body]), body.clone());
            damaged[at % body.len()] ^= 0x10;
            let refused = verify_body(&damaged, sum);
            prop_assert!(matches!(refused, Err(FrameError::BodyChecksum { .. })), "{:?}", refused);
        }
    }
}

#[test]
fn checksum_is_crc32c() {
    assert_eq!(body_sum(Checksum::Crc32c, &[b"1234", b"56789"]), BodySum::Crc32c(0xe306_9283));
    assert_eq!(body_sum(Checksum::Crc32c, &[]), BodySum::Crc32c(0));
}

#[test]
fn the_other_checksum_is_refused_by_name_and_so_are_flags_nobody_knows() {
    let header = FrameHeader {
        kind: FrameKind::Combine,
        dtype: RowType::F32,
        side: SideKind::None,
        epoch: Epoch(1),
        hop: FrameHeader::key(1, 2, 0),
        rows: 0,
        columns: 0,
        side_columns: 0,
        body_bytes: 0,
    };
    for (bytes, limits, found, agreed) in [
        (header.encode(BodySum::Crc32c(0)), SUMMED, Checksum::Crc32c, Checksum::Sum64),
        (header.encode(BodySum::Sum64(0)), LIMITS, Checksum::Sum64, Checksum::Crc32c),
        (header.encode_before(), LIMITS, Checksum::Sum64, Checksum::Crc32c),
    ] {
        let refused = FrameHeader::decode(&bytes, &limits);
        assert_eq!(refused, Err(FrameError::OtherChecksum { found, agreed }));
    }
    let with = |at: usize, value: u8, mut bytes: [u8; HEADER_BYTES]| {
        bytes[at] = value;
        let crc = crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    };
    let (plain, before) = (header.encode(BodySum::Crc32c(0)), header.encode_before());
    for (at, value, field, bytes) in [
        (7, 2, "flags", plain),
        (7, 4, "flags", plain),
        (7, 255, "flags", before),
        (27, 1, "reserved", plain),
        (31, 7, "reserved", before),
        (48, 1, "reserved", plain),
        (48, 1, "reserved", before),
        (59, 1, "reserved", before),
        (56, 1, "reserved", header.encode(BodySum::Sum64(3))),
    ] {
        for limits in [LIMITS, SUMMED] {
            let refused = FrameHeader::decode(&with(at, value, bytes), &limits);
            assert_eq!(refused, Err(FrameError::Unknown { field, value }), "{value} at {at}");
        }
    }
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
    let decode =
        |header: FrameHeader| FrameHeader::decode(&header.encode(BodySum::Crc32c(0)), &LIMITS).map(|_| ());
    assert_eq!(decode(header), Ok(()));
    let rows = decode(FrameHeader { rows: 65, ..header });
    assert_eq!(rows, Err(FrameError::OverLimit { field: "rows", found: 65, limit: 64 }));
    let size = decode(FrameHeader { body_bytes: 25, ..header });
    assert_eq!(size, Err(FrameError::BodySize { found: 25, expected: 24 }));
    let huge = decode(FrameHeader { body_bytes: u32::MAX, ..header });
    assert!(matches!(huge, Err(FrameError::OverLimit { field: "body_bytes", .. })));
    let text = decode(FrameHeader { kind: FrameKind::Error, body_bytes: MAX_TEXT_BYTES + 1, ..header });
    assert!(matches!(text, Err(FrameError::OverLimit { .. })));
}
