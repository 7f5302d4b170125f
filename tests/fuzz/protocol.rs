//! Frames and plans: what an attention rank can send.
use afd_common::frame::{
    BodySum, Checksum, FrameHeader, FrameKind, FrameLimits, HEADER_BYTES, MAX_TEXT_BYTES, RowType, SideKind,
    crc32c, verify_body,
};
use afd_common::ids::{Epoch, HopKey};
use afd_common::proto::v1;
use ffn_svc::session::plans::{Accepted, PlanBook, PlanLimits};
use prost::Message;

use crate::driver::fuzz;

const LIMITS: FrameLimits = FrameLimits { max_rows: 64, max_body_bytes: 1 << 20, checksum: Checksum::Crc32c };

fn header(kind: FrameKind, side: SideKind, rows: u32, body_bytes: u32) -> FrameHeader {
    let hop = HopKey::default();
    let side_columns = if side == SideKind::None { 0 } else { 2 };
    FrameHeader {
        kind,
        dtype: RowType::F32,
        side,
        epoch: Epoch(7),
        hop,
        rows,
        columns: 16,
        side_columns,
        body_bytes,
    }
}

#[test]
fn a_frame_is_what_it_says_or_refused() -> anyhow::Result<()> {
    let seeds = [
        header(FrameKind::Dispatch, SideKind::None, 3, 3 * 64),
        header(FrameKind::Dispatch, SideKind::TopK, 3, 3 * (64 + 16)),
        header(FrameKind::Combine, SideKind::None, 0, 0),
        header(FrameKind::Close, SideKind::None, 0, 5),
    ];
    let encoded = |header: FrameHeader| {
        let sums = [BodySum::Crc32c(7), BodySum::Sum64(7)].map(|sum| header.encode(sum).to_vec());
        sums.into_iter().chain([header.encode_before().to_vec()])
    };
    let seeds = seeds.into_iter().flat_map(encoded).collect();
    fuzz("frame", seeds, &["AFD1"], |input| {
        let mut bytes = [0; HEADER_BYTES];
        let given = input.len().min(HEADER_BYTES);
        bytes[..given].copy_from_slice(&input[..given]);
        // Most would fail the checksum and nothing else: an odd length asks for a right one.
        if input.len() % 2 == 1 {
            let crc = crc32c(&bytes[..HEADER_BYTES - 4]);
            bytes[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        }
        let read = [Checksum::Crc32c, Checksum::Sum64]
            .map(|checksum| FrameHeader::decode(&bytes, &FrameLimits { checksum, ..LIMITS }));
        assert!(read.iter().any(Result::is_err), "a frame is summed in one way");
        let said = read.map(|read| match read {
            Err(error) => error.to_string(),
            Ok((header, sum)) => {
                let again = sum.map_or_else(|| header.encode_before(), |sum| header.encode(sum));
                assert_eq!(again, bytes, "a header has one encoding");
                // Of an error or close frame only the text counts; its rows are nobody's.
                let is_text = matches!(header.kind, FrameKind::Error | FrameKind::Close);
                assert!(header.body_bytes <= if is_text { MAX_TEXT_BYTES } else { LIMITS.max_body_bytes });
                assert!(is_text || header.rows <= LIMITS.max_rows);
                let body = &input[given..];
                let verified = sum.map(|sum| verify_body(body, sum).is_ok());
                format!("{:?} {:?} {verified:?}", header.kind, header.side)
            }
        });
        said.join(" ")
    })
}

#[test]
fn a_book_of_plans_stays_small_and_in_order() -> anyhow::Result<()> {
    let plan = |step_id, padded_tokens: &[u32], revision| v1::StepPlan {
        step_id,
        padded_tokens: padded_tokens.to_vec(),
        revision,
        phase: v1::Phase::Decode.into(),
        ..Default::default()
    };
    let several =
        |plans: &[v1::StepPlan]| plans.iter().flat_map(Message::encode_length_delimited_to_vec).collect();
    let seeds = vec![
        several(&[plan(1, &[4], 0), plan(2, &[4, 3], 0), plan(2, &[4, 3], 1), plan(9, &[1], 0)]),
        several(&(1..40).map(|step| plan(step, &[1], 0)).collect::<Vec<_>>()),
        several(&[plan(u64::MAX, &[u32::MAX, 0], 0), plan(0, &[], u32::MAX)]),
    ];
    fuzz("plan", seeds, &[], |mut input| {
        let mut book = PlanBook::new(PlanLimits { max_stages: 2, max_tokens_per_stage: 64 });
        let (mut said, mut newest) = (String::new(), None);
        while let Ok(plan) = v1::StepPlan::decode_length_delimited(&mut input) {
            match book.accept(&plan) {
                Ok(accepted) => {
                    assert!((1..=2).contains(&plan.padded_tokens.len()));
                    assert!(plan.padded_tokens.iter().all(|tokens| (1..=64).contains(tokens)));
                    if accepted == Accepted::New {
                        assert!(newest.is_none_or(|newest| plan.step_id > newest), "steps grow");
                        newest = Some(plan.step_id);
                    }
                    said.push_str("ok ");
                }
                Err(error) => said.push_str(&error.to_string()),
            }
            assert!(book.num_open() <= 16);
            if input.is_empty() {
                break;
            }
        }
        said
    })
}
