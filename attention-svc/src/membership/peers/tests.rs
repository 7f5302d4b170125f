//! Who is chosen, and who is given up.
use tonic::transport::Endpoint;

use super::*;

fn here(ready: bool, num_requests: u32) -> Peer {
    let channel = Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
    let state = State::Here { channel, ready };
    let load = Arc::new(Load { all: num_requests.into(), ..Load::default() });
    Peer { state, load, ..Peer::unknown("h".into()) }
}

fn peers(all: Vec<Peer>) -> Peers {
    let peers = Peers::new(PeerSettings { timeout: Duration::from_secs(5), ..PeerSettings::default() });
    let address = |n: usize| SocketAddr::from(([10, 0, 0, 1], n as u16));
    peers.lock().extend(all.into_iter().enumerate().map(|(n, peer)| (address(n), peer)));
    peers
}

fn port(chosen: &Option<Chosen>) -> Option<u16> {
    chosen.as_ref().map(|chosen| chosen.peer.address.port())
}

#[tokio::test]
async fn the_least_loaded_rank_serves_and_this_one_when_it_is_a_tie() {
    let peers = peers(vec![here(true, 1), here(true, 0), here(false, 0)]);
    assert_eq!(port(&peers.choose(true)), None, "nothing runs here");
    let serving = (peers.serve(), peers.serve());
    let forwarded = [(); 4].map(|()| peers.choose(true));
    assert_eq!(
        forwarded.each_ref().map(port),
        [Some(1), Some(0), Some(1), None],
        "a forwarded one counts there at once, until there are two everywhere"
    );
    drop(serving);
    assert_eq!(peers.num_local(), 0);
}

#[tokio::test]
async fn a_forwarded_request_that_has_ended_counts_no_more() {
    let peers = peers(vec![here(true, 0)]);
    let _serving = peers.serve();
    let first = peers.choose(true);
    assert_eq!((port(&first), port(&peers.choose(true))), (Some(0), None));
    drop(first);
    let next = peers.choose(true);
    assert_eq!(port(&next), Some(0), "without the peer having been asked again");
    // Asked in the meantime, it did not have the request any more.
    peers.lock().values().for_each(|peer| peer.load.all.store(0, Ordering::Release));
    drop(next);
    assert_eq!(port(&peers.choose(true)), Some(0));
}

#[tokio::test]
async fn a_rank_without_ffn_forwards_whatever_it_can() {
    let peers = peers(vec![here(true, 9)]);
    let chosen = peers.choose(false).expect("it is there");
    peers.handle_failure(chosen.peer, "it failed", "gone");
    assert_eq!(port(&peers.choose(false)), None);
}

#[tokio::test]
async fn what_a_silent_peer_serves_is_lost_and_a_pause_of_this_rank_is_no_silence() {
    let peers = peers(vec![here(true, 0)]);
    let chosen = peers.choose(false).expect("it is there");
    let (begun, second) = (Instant::now(), Duration::from_secs(1));
    // Stood still for ten seconds itself.
    peers.handle_tick(begun, begun + 10 * second);
    assert!(!chosen.lost.is_cancelled());
    for ticks in 10..16 {
        assert!(!chosen.lost.is_cancelled(), "after {ticks} s");
        peers.handle_tick(begun + ticks * second - ASK_EVERY, begun + ticks * second);
    }
    assert!(chosen.lost.is_cancelled());
}

#[tokio::test]
async fn who_is_not_forwarded_to_is_told_and_another_address_of_somebodys_host_is_not() {
    let away = |why: Away| Peer { state: State::Away(why), ..Peer::unknown("h".into()) };
    let refused = || Away::ForNow("refused".into());
    let wrong_role = || Away::ForGood("it is an FFN rank".into());
    let told = |all: Vec<Peer>| {
        let peers = peers(all);
        peers.handle_resolved("nowhere:1", Some("no such host".into()));
        peers.handle_resolved("somewhere:1", Some("no such host".into()));
        peers.handle_resolved("somewhere:1", None);
        peers.absent().into_iter().map(|absence| (absence.address, absence.why)).collect::<Vec<_>>()
    };
    let nowhere = ("nowhere:1".to_owned(), "it cannot be resolved: no such host".to_owned());
    let at = |n: u16, why: &str| (format!("10.0.0.1:{n}"), why.to_owned());
    let all_of_it = std::slice::from_ref(&nowhere);
    assert_eq!(told(vec![here(true, 0), away(Away::Unasked), away(refused())]), all_of_it);
    assert_eq!(told(vec![away(refused())]), [at(0, "refused"), nowhere.clone()]);
    let gone = Peer { was_here: true, ..away(refused()) };
    let expected = [at(0, "refused"), at(2, "it is an FFN rank"), nowhere];
    assert_eq!(told(vec![gone, away(refused()), away(wrong_role())]), expected);
}
