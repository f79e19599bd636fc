#include "common/ngram_nodes.h"

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "common/check.h"

namespace jaxserve {
namespace {

constexpr uint32_t kFirstBuckets = 64;

uint32_t hash_of(uint32_t parent, int32_t token) {
  uint64_t key = (static_cast<uint64_t>(parent) << 32) | static_cast<uint32_t>(token);
  key *= 0x9e3779b97f4a7c15u;
  key ^= key >> 32;
  key *= 0xd6e8feb86659fd93u;
  return static_cast<uint32_t>(key >> 32);
}

}  // namespace

NgramNodes::NgramNodes(uint32_t capacity) : capacity_(capacity) {
  try {
    nodes_.reset(new Node[static_cast<std::size_t>(capacity) + 1]);
    buckets_.reset(new Index[std::max(capacity, kFirstBuckets)]);
  } catch (const std::bad_alloc&) {
    const uint64_t bytes = static_cast<uint64_t>(capacity) * (sizeof(Node) + sizeof(Index));
    JAXSERVE_CHECK(false, "NgramTrie", "no memory for " + std::to_string(capacity) + " nodes (" +
                                           std::to_string(bytes >> 20) + " MiB); ask for a smaller capacity");
  }
  clear();
}

void NgramNodes::clear() {
  nodes_[kRoot] = Node{-1, kRoot, kRoot, kRoot, kRoot, kRoot, kRoot, kRoot, kRoot, 0, 0};
  num_buckets_ = bucket_base_ = kFirstBuckets;
  std::fill_n(buckets_.get(), num_buckets_, kRoot);
  first_unused_ = 1;
  num_nodes_ = 0;
}

// -- by last use -------------------------------------------------------------------------------------------------------

void NgramNodes::unlist(Index node) {
  const Node& n = nodes_[node];
  nodes_[n.newer].older = n.older;
  nodes_[n.older].newer = n.newer;
}

void NgramNodes::list_newest(Index node) {
  const Index newest = nodes_[kRoot].older;
  nodes_[node].older = newest;
  nodes_[node].newer = kRoot;
  nodes_[newest].newer = node;
  nodes_[kRoot].older = node;
}

void NgramNodes::list_oldest(Index node) {
  const Index oldest = nodes_[kRoot].newer;
  nodes_[node].newer = oldest;
  nodes_[node].older = kRoot;
  nodes_[oldest].older = node;
  nodes_[kRoot].newer = node;
}

void NgramNodes::park(Index node) {
  unlist(node);
  nodes_[node].older = node;
}

void NgramNodes::use(Index node) {
  if (!is_parked(node)) unlist(node);
  list_newest(node);
}

void NgramNodes::unpin(Index node) {
  --nodes_[node].num_dependents;
  // Parked while pinned: it is in use, so the newest, not the oldest.
  if (node != kRoot && is_parked(node)) list_newest(node);
}

// -- children ----------------------------------------------------------------------------------------------------------

void NgramNodes::link_sibling(Index node) {
  Node& parent = nodes_[nodes_[node].parent];
  nodes_[node].next_sibling = parent.first_child;
  nodes_[node].previous_sibling = kRoot;
  if (parent.first_child != kRoot) nodes_[parent.first_child].previous_sibling = node;
  parent.first_child = node;
}

void NgramNodes::unlink_sibling(Index node) {
  const Node& n = nodes_[node];
  if (n.previous_sibling == kRoot) {
    nodes_[n.parent].first_child = n.next_sibling;
  } else {
    nodes_[n.previous_sibling].next_sibling = n.next_sibling;
  }
  if (n.next_sibling != kRoot) nodes_[n.next_sibling].previous_sibling = n.previous_sibling;
}

NgramNodes::Index NgramNodes::child(Index parent, int32_t token) const {
  const Index first = nodes_[parent].first_child;
  // Most nodes have one child; reading it spares the bucket.
  if (first == kRoot || nodes_[first].token == token) return first;
  if (nodes_[first].next_sibling == kRoot) return kRoot;
  Index node = buckets_[bucket_of(parent, token)];
  while (node != kRoot && (nodes_[node].parent != parent || nodes_[node].token != token)) {
    node = nodes_[node].next_in_bucket;
  }
  return node;
}

void NgramNodes::see(Index node) {
  Node& n = nodes_[node];
  if (n.count != UINT32_MAX) ++n.count;
  if (n.previous_sibling != kRoot) {
    unlink_sibling(node);
    link_sibling(node);
  }
  use(node);
}

// -- buckets -----------------------------------------------------------------------------------------------------------

uint32_t NgramNodes::bucket_of(Index parent, int32_t token) const {
  const uint32_t hash = hash_of(parent, token);
  const uint32_t wide = hash & (2 * bucket_base_ - 1);
  return wide < num_buckets_ ? wide : hash & (bucket_base_ - 1);
}

void NgramNodes::link_bucket(Index node) {
  Index& head = buckets_[bucket_of(nodes_[node].parent, nodes_[node].token)];
  nodes_[node].next_in_bucket = head;
  head = node;
}

void NgramNodes::unlink_bucket(Index node) {
  Index* link = &buckets_[bucket_of(nodes_[node].parent, nodes_[node].token)];
  while (*link != node) link = &nodes_[*link].next_in_bucket;
  *link = nodes_[node].next_in_bucket;
}

// Linear hashing: the next bucket in turn shares its nodes with a new one. No rehash ever holds up a step.
void NgramNodes::split_bucket() {
  const uint32_t split = num_buckets_ - bucket_base_;
  Index node = buckets_[split];
  buckets_[split] = kRoot;
  buckets_[num_buckets_++] = kRoot;
  while (node != kRoot) {
    const Index next = nodes_[node].next_in_bucket;
    link_bucket(node);
    node = next;
  }
  if (num_buckets_ == 2 * bucket_base_) bucket_base_ = num_buckets_;
}

// -- nodes come and go -------------------------------------------------------------------------------------------------

NgramNodes::Index NgramNodes::add(Index parent, int32_t token, Index suffix) {
  ++nodes_[parent].num_dependents;  // before the eviction, which must spare them
  ++nodes_[suffix].num_dependents;
  const Index node = num_nodes_ < capacity_ ? first_unused_++ : evict_oldest();
  nodes_[node] = Node{token, parent, suffix, kRoot, kRoot, kRoot, kRoot, kRoot, kRoot, 0, 0};
  ++num_nodes_;
  if (num_nodes_ > num_buckets_) split_bucket();
  link_bucket(node);
  link_sibling(node);
  list_newest(node);
  return node;
}

// Evicts the least recently used node without dependents; returns its index, for the node it makes room for.
NgramNodes::Index NgramNodes::evict_oldest() {
  Index node = nodes_[kRoot].newer;
  while (node != kRoot && nodes_[node].num_dependents != 0) {
    park(node);
    node = nodes_[kRoot].newer;
  }
  // The trie's smallest capacity leaves room beside the longest n-gram and all its parts.
  JAXSERVE_CHECK(node != kRoot, "NgramTrie.append", "every node is in use");
  unlink_bucket(node);
  unlink_sibling(node);
  unlist(node);
  drop_dependent(nodes_[node].suffix);
  drop_dependent(nodes_[node].parent);  // last, to be the oldest: it was seen one token before the suffix
  --num_nodes_;
  ++num_evictions_;
  return node;
}

void NgramNodes::drop_dependent(Index node) {
  if (--nodes_[node].num_dependents == 0 && node != kRoot && is_parked(node)) list_oldest(node);
}

// -- integrity ---------------------------------------------------------------------------------------------------------

void NgramNodes::check_integrity(int32_t max_depth) const {
  const auto check = [](bool holds, Index node, const char* claim) {
    JAXSERVE_CHECK(holds, "NgramTrie.check_integrity", "node " + std::to_string(node) + ": " + claim);
  };
  std::vector<uint32_t> num_dependents(first_unused_, 0);
  std::vector<int32_t> depths(first_unused_, -1);
  std::vector<Index> reached = {kRoot};
  depths[kRoot] = 0;
  for (std::size_t i = 0; i < reached.size(); ++i) {
    const Index parent = reached[i];
    Index previous = kRoot;
    for (Index node = nodes_[parent].first_child; node != kRoot; node = nodes_[node].next_sibling) {
      const Node& n = nodes_[node];
      check(node < first_unused_ && depths[node] < 0, node, "is reached twice or was never added");
      check(n.parent == parent && n.previous_sibling == previous, node, "its parent or previous sibling is another");
      check(child(parent, n.token) == node, node, "is not found by its token");
      check(n.suffix == (parent == kRoot ? kRoot : child(nodes_[parent].suffix, n.token)), node, "has a wrong suffix");
      check(parent == kRoot || n.suffix != kRoot, node, "has no suffix");
      depths[node] = depths[parent] + 1;
      check(depths[node] <= max_depth, node, "is too deep");
      ++num_dependents[parent];
      ++num_dependents[n.suffix];
      reached.push_back(node);
      previous = node;
    }
  }
  check(reached.size() == num_nodes_ + std::size_t{1} && num_nodes_ <= capacity_, kRoot, "reaches a wrong number");
  std::size_t num_parked = 0;
  for (const Index node : reached) {
    check(nodes_[node].num_dependents == num_dependents[node], node, "has a wrong number of dependents");
    if (node == kRoot || !is_parked(node)) continue;
    check(num_dependents[node] > 0, node, "is parked without dependents");
    ++num_parked;
  }
  std::size_t num_listed = 0;
  for (Index node = nodes_[kRoot].older; node != kRoot; node = nodes_[node].older, ++num_listed) {
    check(depths[node] > 0 && num_listed < num_nodes_, node, "is listed and not reached, or listed twice");
    check(nodes_[nodes_[node].older].newer == node, node, "its neighbour by last use does not know it");
  }
  check(num_listed + num_parked == num_nodes_, kRoot, "lists a wrong number of nodes");
  std::size_t num_hashed = 0;
  for (uint32_t bucket = 0; bucket < num_buckets_; ++bucket) {
    for (Index node = buckets_[bucket]; node != kRoot; node = nodes_[node].next_in_bucket, ++num_hashed) {
      check(depths[node] > 0 && num_hashed < num_nodes_, node, "is hashed and not reached, or hashed twice");
      check(bucket_of(nodes_[node].parent, nodes_[node].token) == bucket, node, "is in a wrong bucket");
    }
  }
  check(num_hashed == num_nodes_, kRoot, "hashes a wrong number of nodes");
}

}  // namespace jaxserve
