//! Placements: files against models, who serves what, proposals.
use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;

fn config(name: &str) -> ModelConfig {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    ModelConfig::load(&fixtures.join(name)).unwrap()
}

fn toml(text: &str) -> Result<Placement, String> {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    let read = PlacementFile::read(file.path())?;
    read.placement(&config("tiny-mixtral"), None).map_err(|error| error.to_string())
}

#[test]
fn a_file_places_every_layer_by_default_or_by_name() {
    let placed =
        toml("experts = [[0, 1, 2, 3], [3, 4, 5, 6, 7]]\n[layers]\n2 = [[7, 6, 5, 4, 3, 2, 1, 0], []]")
            .unwrap();
    assert_eq!(placed.num_shards(), 2);
    let layer = placed.layer(0).unwrap();
    assert_eq!((layer.owners(3), layer.owners(4)), (&[0, 1][..], &[1][..]));
    assert_eq!((layer.experts_of(1), layer.has_copies()), (vec![3, 4, 5, 6, 7], true));
    let layer = placed.layer(2).unwrap();
    assert_eq!((layer.experts_of(0).len(), layer.experts_of(1).len(), layer.has_copies()), (8, 0, false));
    assert!(placed.layer(4).is_none());
}

#[test]
fn what_is_wrong_is_named() {
    let refused = |text: &str| toml(text).unwrap_err();
    assert!(refused("colour = 1").contains("unknown field `colour`"));
    assert_eq!(refused("experts = [[0, 1], [2, 3]]"), "`experts`: no shard has expert 4 of layer 0");
    assert_eq!(
        refused("experts = [[0, 1, 2, 3], [4, 5, 6, 8]]"),
        "`experts`: shard 1 lists expert 8; layer 0 has 8"
    );
    assert_eq!(
        refused("experts = [[0, 1, 2, 3, 0], [4, 5, 6, 7]]"),
        "`experts`: shard 0 lists expert 0 twice"
    );
    let all = "experts = [[0, 1, 2, 3], [4, 5, 6, 7]]\n[layers]\n";
    assert_eq!(
        refused(&format!("{all}1 = [[0, 1, 2, 3, 4, 5, 6, 7]]")),
        "`layers.1` lists 1 shards, expected 2"
    );
    assert_eq!(refused(&format!("{all}9 = [[], []]")), "`layers.9`: is no layer; the model has 4");
    assert_eq!(refused(&format!("{all}01 = [[], []]")), "`layers.01`: is not written plainly: `1`");
    assert!(refused("[layers]\n0 = [[0, 1, 2, 3, 4, 5, 6, 7]]").contains("neither `experts` nor `layers.1`"));
    let three = PlacementFile { experts: Some(vec![(0..8).collect(), vec![]]), layers: BTreeMap::new() };
    let other = three.placement(&config("tiny-mixtral"), Some(3)).unwrap_err();
    assert_eq!(other.to_string(), "`experts` lists 2 shards, expected 3");
}

fn read_json(text: &str) -> PlacementFile {
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    PlacementFile::read(file.path()).unwrap()
}

#[test]
fn what_is_written_has_a_line_for_each_shard() {
    let shards = |lists: [&[usize]; 2]| lists.map(<[usize]>::to_vec).to_vec();
    let layers = [("10", shards([&[0, 2], &[1]])), ("2", shards([&[0, 1, 2], &[]]))];
    let layers = layers.map(|(name, shards)| (name.to_owned(), shards)).into();
    let file = PlacementFile { experts: Some(shards([&[0], &[1, 2]])), layers };
    let expected = r#"{
  "experts": [
    [0],
    [1, 2]
  ],
  "layers": {
    "2": [
      [0, 1, 2],
      []
    ],
    "10": [
      [0, 2],
      [1]
    ]
  }
}
"#;
    assert_eq!(file.to_json(), expected);
    assert_eq!(PlacementFile::default().to_json(), "{}\n");
}

#[test]
fn files_that_say_the_same_have_the_same_digest() {
    let config = config("tiny-mixtral");
    let digest = |text: &str| toml(text).unwrap().digest(&config);
    assert_eq!(digest("experts = [[3, 2, 1, 0], [4, 5, 6, 7]]"), CONTIGUOUS);
    let one = digest("experts = [[0, 1, 2, 3, 4], [4, 5, 6, 7]]");
    assert_eq!(one, digest("experts = [[4, 3, 2, 1, 0], [7, 6, 5, 4]]"));
    assert_ne!(one, digest("experts = [[0, 1, 2, 3], [3, 4, 5, 6, 7]]"));
    assert_eq!(one.len(), 16);
    assert_eq!(Placement::contiguous(&config, 3).digest(&config), CONTIGUOUS);
}

#[test]
fn a_shard_without_an_expert_is_named_with_its_layers() {
    let warning = |text: &str| toml(text).unwrap().warning();
    assert_eq!(warning("experts = [[0, 1, 2, 3], [4, 5, 6, 7]]"), None);
    let said =
        warning("experts = [[0, 1, 2, 3], [4, 5, 6, 7]]\n[layers]\n1 = [[0, 1, 2, 3, 4, 5, 6, 7], []]");
    assert_eq!(said.unwrap(), "--placement leaves shards without an expert: shard 1 in layer 1");
    let said = warning("experts = [[], [0, 1, 2, 3, 4, 5, 6, 7]]").unwrap();
    assert!(
        said.starts_with("--placement leaves shards without an expert: shard 0 in layers 0, 1"),
        "{said}"
    );
}

#[test]
fn copies_share_the_rows_evenly_and_every_row_has_one_server() {
    let layer = LayerPlacement::of(&[vec![0, 1], vec![0, 2], vec![0, 3]], 4);
    let mut served = [0; 3];
    for row in 0..3000u32 {
        let bytes: Vec<u8> = (0..16).flat_map(|i| (row as f32 * 0.37 + i as f32).to_le_bytes()).collect();
        let salt = row_salt(&bytes);
        assert_eq!(salt, row_salt(&bytes), "the same for everyone");
        served[layer.server(0, salt) as usize] += 1;
        assert_eq!((layer.server(1, salt), layer.server(3, salt)), (0, 2));
        assert_eq!(layer.shared_server(0, salt), layer.server(0, salt));
    }
    assert!(served.iter().all(|count| (800..1200).contains(count)), "{served:?}");
    assert_eq!(layer.shared_server(-1, 7), 0, "padding");
}

#[test]
fn a_proposal_copies_what_is_hot_and_evens_the_rest_out() {
    let loads = BTreeMap::from([(1, vec![800, 100, 100, 50, 50, 40, 30, 30])]);
    let plain = propose(&loads, 2, 0).unwrap();
    let copied = propose(&loads, 2, 1).unwrap();
    let LayerProposal { contiguous, proposed, .. } = plain.layers[&1];
    assert!(contiguous > 1.7 && proposed < contiguous);
    assert!(copied.layers[&1].proposed < 1.05, "{:?}", copied.layers);
    let lists = &copied.file.layers["1"];
    assert!(lists.iter().all(|list| list.contains(&0)), "the hot one is on both: {lists:?}");
    assert_eq!(propose(&BTreeMap::new(), 2, 0), Err(ProposeError::NoCounts));
    assert_eq!(propose(&loads, 0, 0), Err(ProposeError::Shards { shards: 0 }));
    let crowded = propose(&loads, 9, 0).unwrap_err();
    assert_eq!(crowded.to_string(), "9 shards; layer 1 has 8 experts");
    assert_eq!(propose(&loads, 2, 99).unwrap().layers[&1].copies, 8, "one on each shard is all that fits");
}

#[test]
fn fewer_copies_than_were_asked_for_have_a_reason() {
    let of = |load: &[u64], shards, copies| {
        let loads = BTreeMap::from([(0, load.to_vec()), (1, vec![1; load.len()])]);
        let LayerProposal { copies, fewer, .. } = propose(&loads, shards, copies).unwrap().layers[&0];
        (copies, fewer)
    };
    let hot = [90, 1, 1, 0];
    assert_eq!(of(&hot, 2, 0), (0, None));
    assert_eq!(of(&hot, 2, 1), (1, None));
    assert_eq!(of(&hot, 2, 9), (3, Some(FewerCopies::Everywhere { most: 3 })));
    assert_eq!(of(&[0; 4], 2, 1), (0, Some(FewerCopies::NoRows)));
    assert_eq!(propose(&BTreeMap::from([(0, vec![0; 4])]), 2, 1), Err(ProposeError::NoRows));
    assert_eq!(of(&hot, 1, 1), (0, Some(FewerCopies::OneShard)));
    // Two shards with two equal experts each are as even as can be, and three copies on two shards are not.
    assert_eq!(of(&[5, 5, 5, 5], 2, 1), (0, Some(FewerCopies::NoBetter)));
}

proptest! {
    /// Whatever a file says, the reader finds it again in what is written.
    #[test]
    fn what_is_written_is_read_back(
        experts in prop::option::of(prop::collection::vec(prop::collection::vec(0usize..300, 0..9), 0..5)),
        layers in prop::collection::btree_map(
            "[0-9]{1,3}|[\\PC\"\\\\\n]{0,4}",
            prop::collection::vec(prop::collection::vec(any::<usize>(), 0..9), 0..5),
            0..5,
        ),
    ) {
        let file = PlacementFile { experts, layers };
        prop_assert_eq!(&read_json(&file.to_json()), &file);
    }

    /// Whatever was counted: every expert has an owner, no shard holds much more than its share, and it is never worse
    /// balanced than contiguous parts.
    #[test]
    fn proposals_are_placements(
        load in prop::collection::vec(0u64..1000, 1..40),
        shards in 1u32..6,
        copies in 0usize..12,
    ) {
        prop_assume!(shards as usize <= load.len() && load.iter().any(|rows| *rows > 0));
        let proposal = propose(&BTreeMap::from([(0, load.clone())]), shards, copies).unwrap();
        prop_assert!(proposal.layers[&0].proposed <= proposal.layers[&0].contiguous);
        let lists = &proposal.file.layers["0"];
        let placed = LayerPlacement::checked(lists, load.len(), "layers.0", 0).unwrap();
        prop_assert_eq!(placed.num_shards(), shards);
        let total: usize = lists.iter().map(Vec::len).sum();
        prop_assert!(total <= load.len() + copies);
        prop_assert!(lists.iter().all(|list| list.len() <= total.div_ceil(shards as usize) + copies.min(1)));
        prop_assert_eq!(&proposal, &propose(&BTreeMap::from([(0, load)]), shards, copies).unwrap());
    }
}
