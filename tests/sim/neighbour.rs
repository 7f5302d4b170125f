//! Another attention rank on the same FFN process, as little as it takes: one hop at a time on a link of its own. What
//! happens to others must not change what it gets.
use afd_common::frame::{FrameHeader, FrameKind, RowType, SideKind};
use afd_common::ids::{Epoch, Shard};
use afd_common::link::HopLink;
use afd_common::link::bare::BareLink;

use crate::dice::Dice;
use crate::model::{HIDDEN, Rows, TOP_K};

/// After this long an answer is not waited for: the frame was lost.
const PATIENCE_US: u64 = 40_000;

pub(crate) struct Neighbour {
    link: BareLink,
    shard: Shard,
    is_routed: bool,
    step: u64,
    asked: Option<(FrameHeader, Rows, u64)>,
    pub(crate) num_answers: u64,
}

/// What it wants.
#[derive(PartialEq)]
pub(crate) enum Wants {
    Nothing,
    NewLink,
}

impl Neighbour {
    pub(crate) fn new(link: BareLink, shard: Shard, is_routed: bool, step: u64) -> Self {
        Self { link, shard, is_routed, step, asked: None, num_answers: 0 }
    }

    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Looks at its link and asks for the next hop.
    ///
    /// # Errors
    /// An answer that is wrong.
    pub(crate) fn turn(&mut self, now_us: u64, num_layers: u16, dice: &mut Dice) -> Result<Wants, String> {
        loop {
            match self.link.poll_recv() {
                Ok(None) => break,
                Ok(Some(frame)) => {
                    let Some((asked, values, _)) = self.asked.take() else {
                        return Err(format!("a neighbour was answered twice: {:?}", frame.header));
                    };
                    if frame.header.kind == FrameKind::Error {
                        // The FFN has seen a duplicate whose first answer got lost: a link that cannot be trusted.
                        return Ok(Wants::NewLink);
                    }
                    let partial = values.partial(asked.hop.layer.0, self.shard);
                    let expected: Vec<u8> = partial.iter().flat_map(|x| x.to_le_bytes()).collect();
                    if frame.header.hop != asked.hop || frame.body() != expected {
                        return Err(format!("a neighbour asked for {asked:?} and got {:?}", frame.header));
                    }
                    self.num_answers += 1;
                }
                Err(_) => return Ok(Wants::NewLink),
            }
        }
        match &self.asked {
            Some((_, _, since_us)) if now_us - since_us > PATIENCE_US => return Ok(Wants::NewLink),
            Some(_) => return Ok(Wants::Nothing),
            None => {}
        }
        self.step += 1;
        let (num_rows, layer) = (dice.index(3), dice.index(num_layers.into()) as u16);
        let values = Rows::throw(dice, num_rows, self.is_routed);
        let body = values.bytes();
        let (side, side_columns) =
            if self.is_routed { (SideKind::TopK, TOP_K as u32) } else { (SideKind::None, 0) };
        let header = FrameHeader {
            kind: FrameKind::Dispatch,
            dtype: RowType::F32,
            side,
            epoch: Epoch(0),
            hop: FrameHeader::key(self.step, layer, 0),
            rows: num_rows as u32,
            columns: HIDDEN as u32,
            side_columns,
            body_bytes: body.len() as u32,
        };
        if self.link.send(header, &[&body]).is_err() {
            return Ok(Wants::NewLink);
        }
        self.asked = Some((header, values, now_us));
        Ok(Wants::Nothing)
    }
}
