//! Two ends in one process, over a file in a temporary folder.
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use super::*;
use crate::futex;

const SHAPE: (u32, usize) = (3, 5000);

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("afd-shm-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn pair(folder: &Folder) -> ((Sender, Receiver), (Sender, Receiver)) {
    let (path, shape) = (folder.0.join("segment"), Shape::new(SHAPE.0, SHAPE.1).unwrap());
    let first = Segment::create(&path, shape, &[7; 16]).unwrap();
    let second = Segment::open(&path, shape).unwrap();
    assert_eq!((first.nonce(), second.nonce()), ([7; 16], [7; 16]));
    (first.lanes(Side::First), second.lanes(Side::Second))
}

#[test]
fn what_is_sent_arrives_in_order_and_slots_are_given_back_in_any() {
    let folder = Folder::new("order");
    let ((mut out, _), (_, mut into)) = pair(&folder);
    assert!(into.pop().unwrap().is_none());
    for byte in 1..=3 {
        out.push(&[byte; 10], &[&[byte; 4980], &[byte; 10]]).unwrap();
    }
    assert_eq!(out.push(b"x", &[]), Err(PushError::Full));
    let mut held: Vec<_> = std::iter::from_fn(|| into.pop().unwrap()).collect();
    assert_eq!(held.iter().map(|slot| slot[4999]).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(out.push(b"x", &[]), Err(PushError::Full), "held slots are not free");
    drop(held.remove(1));
    out.push(b"again", &[]).unwrap();
    assert_eq!(&into.pop().unwrap().unwrap()[..5], b"again");
    assert_eq!(held[1][0], 3, "what is held does not change");
    assert_eq!(out.push(&[0], &[&[0; 5000]]), Err(PushError::TooLarge));
    drop((out, into));
    assert_eq!(held[0][17], 1, "a slot outlives both ends");
}

#[test]
fn a_segment_is_private_new_and_of_the_agreed_shape() {
    use std::os::unix::fs::MetadataExt;
    let folder = Folder::new("shape");
    let (path, shape) = (folder.0.join("segment"), Shape::new(SHAPE.0, SHAPE.1).unwrap());
    assert!(Segment::open(&path, shape).is_err(), "not there yet");
    let _first = Segment::create(&path, shape, &[0; 16]).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!(metadata.mode() & 0o777, 0o600);
    assert!(metadata.blocks() * 512 >= shape.total_bytes() as u64, "really allocated");
    assert!(Segment::create(&path, shape, &[0; 16]).is_err(), "never over what is there");
    assert!(Segment::open(&path, Shape::new(4, SHAPE.1).unwrap()).is_err());
    assert!(Segment::open(&path, Shape::new(SHAPE.0, SHAPE.1 + 1).unwrap()).is_err());
    assert_eq!(Shape::new(0, 1), None);
    assert_eq!(Shape::new(u32::MAX, usize::MAX / 2), None);
}

#[test]
fn a_peer_that_lies_is_found_out() {
    let folder = Folder::new("lies");
    for (lie, what) in [
        (Box::new(|out: &mut Sender| out.forge_head(4)) as Box<dyn Fn(&mut Sender)>, "more frames"),
        (Box::new(|out: &mut Sender| out.forge_queue(0, 3)), "does not exist"),
        (Box::new(|out: &mut Sender| out.forge_queue(1, 0)), "not given back"),
    ] {
        let ((mut out, _), (_, mut into)) = pair(&folder);
        out.push(b"a", &[]).unwrap();
        out.push(b"b", &[]).unwrap();
        lie(&mut out);
        let mut held = Vec::new();
        let error = loop {
            match into.pop() {
                Ok(slot) => held.push(slot.unwrap()),
                Err(error) => break error,
            }
        };
        assert!(error.what.contains(what), "{error}");
        std::fs::remove_file(folder.0.join("segment")).unwrap();
    }
}

#[test]
fn a_sleeping_receiver_is_woken() {
    const FRAMES: u32 = 2000;
    let folder = Folder::new("wake");
    let ((mut out, _), (_, mut into)) = pair(&folder);
    thread::scope(|scope| {
        scope.spawn(move || {
            for frame in 0..FRAMES {
                while out.push(&frame.to_le_bytes(), &[]) == Err(PushError::Full) {
                    thread::yield_now();
                }
            }
        });
        let watch = into.watch();
        let mut received = 0;
        while received < FRAMES {
            match into.pop().unwrap() {
                Some(slot) => {
                    assert_eq!(slot[..4], received.to_le_bytes());
                    received += 1;
                }
                None => {
                    watch.set_sleeping(true);
                    if !watch.moved() {
                        let (word, seen, scope) = watch.word();
                        futex::wait(word, seen, scope, Some(Duration::from_secs(20)));
                    }
                    watch.set_sleeping(false);
                }
            }
        }
    });
}
