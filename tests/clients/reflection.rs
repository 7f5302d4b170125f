//! What grpcurl and its kind do: list the services, then fetch every file behind a symbol, without a .proto at hand.
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail, ensure};
use prost::Message;
use prost_types::{FileDescriptorProto, FileDescriptorSet};
use tonic::transport::{Channel, Endpoint};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

use crate::pair;

#[tokio::test]
async fn attention_describes_what_it_serves() -> anyhow::Result<()> {
    let deployment = pair().await?;
    describes(
        &deployment.attention_addresses[0].to_string(),
        &["afd.v1.InferenceService", "afd.v1.MembershipService"],
    )
    .await
}

#[tokio::test]
async fn ffn_describes_what_it_serves() -> anyhow::Result<()> {
    let deployment = pair().await?;
    let services = ["afd.v1.FfnControlService", "afd.v1.LayerStageService"];
    describes(&deployment.ffn_addresses[0].to_string(), &services).await
}

/// Exactly these services of ours and health; and for each of ours the same descriptors that `proto/` gives.
async fn describes(address: &str, ours: &[&str]) -> anyhow::Result<()> {
    let mut server = Reflection::connect(address).await?;
    let listed: BTreeSet<_> = server.services().await?.into_iter().collect();
    let wanted: BTreeSet<_> =
        ours.iter().chain(&["grpc.health.v1.Health"]).map(|name| (*name).to_owned()).collect();
    ensure!(listed == wanted, "{listed:?} are listed, served are {wanted:?}");

    let compiled = FileDescriptorSet::decode(afd_common::proto::DESCRIPTOR_SET)?;
    let compiled: BTreeMap<_, _> =
        compiled.file.into_iter().map(|file| (file.name().to_owned(), file)).collect();
    for service in ours {
        let files = server.files_behind(service).await?;
        let declares = |file: &FileDescriptorProto| {
            file.service.iter().any(|item| format!("{}.{}", file.package(), item.name()) == *service)
        };
        ensure!(files.values().any(declares), "{service} is in none of {:?}", files.keys());
        for (name, file) in &files {
            ensure!(compiled.get(name) == Some(file), "{name} is not the file that was compiled");
        }
    }
    // Without this a tool prints the details of an error as bytes.
    let details = server.files_behind("google.rpc.BadRequest").await?;
    ensure!(details.values().any(|file| file.package() == "google.rpc"), "{:?}", details.keys());
    let unknown = server.ask(MessageRequest::FileContainingSymbol("afd.v1.NoSuchService".into())).await;
    ensure!(unknown.is_err(), "{unknown:?} for an unknown symbol");
    Ok(())
}

/// A reflection client as tools write them: one question at a time.
struct Reflection(ServerReflectionClient<Channel>);

impl Reflection {
    async fn connect(address: &str) -> anyhow::Result<Self> {
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
        Ok(Self(ServerReflectionClient::new(channel)))
    }

    async fn ask(&mut self, question: MessageRequest) -> anyhow::Result<MessageResponse> {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
        let mut answers = self.0.server_reflection_info(tokio_stream::once(request)).await?.into_inner();
        let answer: ServerReflectionResponse = answers.message().await?.context("no answer")?;
        answer.message_response.context("an empty answer")
    }

    async fn services(&mut self) -> anyhow::Result<Vec<String>> {
        match self.ask(MessageRequest::ListServices(String::new())).await? {
            MessageResponse::ListServicesResponse(list) => {
                Ok(list.service.into_iter().map(|service| service.name).collect())
            }
            other => bail!("{other:?} instead of a list"),
        }
    }

    /// The file that declares `symbol` and all it imports, by name, each decoded alone as tools do.
    async fn files_behind(&mut self, symbol: &str) -> anyhow::Result<BTreeMap<String, FileDescriptorProto>> {
        let mut files = BTreeMap::new();
        let mut questions = vec![MessageRequest::FileContainingSymbol(symbol.to_owned())];
        while let Some(question) = questions.pop() {
            let MessageResponse::FileDescriptorResponse(answer) = self.ask(question.clone()).await? else {
                bail!("no file for {question:?}");
            };
            for bytes in answer.file_descriptor_proto {
                let file = FileDescriptorProto::decode(&bytes[..])?;
                let missing = file.dependency.iter().filter(|name| !files.contains_key(*name));
                questions.extend(missing.map(|name| MessageRequest::FileByFilename(name.clone())));
                files.insert(file.name().to_owned(), file);
            }
        }
        Ok(files)
    }
}
