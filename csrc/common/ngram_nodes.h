// The nodes of an n-gram trie: one pool, indices for pointers, never more than `capacity` of them.
//
// A node stands for an n-gram, the tokens on its path from the root. It has a parent (the n-gram without its last
// token) and a suffix (the n-gram without its first token); the root, index 0, is the empty n-gram and the suffix of
// single tokens. Whoever adds a node has both, so every part of a stored n-gram is stored too, and all suffixes of a
// text are found by following suffix links.
//
// Eviction. A node has as many dependents as it has children and as there are nodes whose suffix it is. When the pool
// is full, the least recently used node without dependents goes: children before parents, n-grams before their parts.
// All nodes stand in one list by last use. A node with dependents that reaches its old end is parked: taken off the
// list until its last dependent has gone, then put back at the old end, for it is older than what is listed. Each park
// is paid for by a use, so making room is O(1) amortised.
//
// Not thread-safe; NgramTrie holds a mutex.
#pragma once

#include <cstdint>
#include <memory>

namespace jaxserve {

class NgramNodes {
 public:
  using Index = uint32_t;
  static constexpr Index kRoot = 0;  // also "no node": the root is nobody's child

  // Raises NativeError if the memory cannot be reserved. It is reserved at once and occupied as nodes are added.
  explicit NgramNodes(uint32_t capacity);

  // The child of `parent` for `token`; kRoot if there is none. O(1), however many children there are.
  Index child(Index parent, int32_t token) const;

  // Adds the child of `parent` for `token`, which must not exist, seen 0 times, most recently used. `suffix` is the
  // parent's suffix's child for the same token. Evicts when full; what is pinned and what it depends on stays.
  Index add(Index parent, int32_t token, Index suffix);

  // Notes an occurrence of the n-gram: counts it, makes it its parent's most recently seen child, and uses it.
  void see(Index node);
  // Makes the node the most recently used one.
  void use(Index node);

  // While pinned, neither the node nor any part of its n-gram is evicted.
  void pin(Index node) { ++nodes_[node].num_dependents; }
  void unpin(Index node);

  void clear();

  // Raises NativeError, naming the node, unless all links, lists and numbers agree. Slow, for tests.
  void check_integrity(int32_t max_depth) const;

  int32_t token(Index node) const { return nodes_[node].token; }
  Index suffix(Index node) const { return nodes_[node].suffix; }
  // Occurrences seen; an n-gram that was evicted starts anew. Stays at 2^32 - 1.
  uint32_t count(Index node) const { return nodes_[node].count; }
  // Children from the most to the least recently seen, ended by kRoot.
  Index first_child(Index node) const { return nodes_[node].first_child; }
  Index next_sibling(Index node) const { return nodes_[node].next_sibling; }

  uint32_t num_nodes() const { return num_nodes_; }
  uint32_t capacity() const { return capacity_; }
  uint64_t num_evictions() const { return num_evictions_; }

 private:
  // No initialisers: the pool is not written before it is used.
  struct Node {
    int32_t token;
    Index parent;
    Index suffix;
    Index first_child;
    Index next_sibling;
    Index previous_sibling;
    Index older;  // by last use; the root ends both directions. Its own index: parked
    Index newer;
    Index next_in_bucket;
    uint32_t count;
    uint32_t num_dependents;
  };

  bool is_parked(Index node) const { return nodes_[node].older == node; }
  void unlist(Index node);
  void list_newest(Index node);
  void list_oldest(Index node);
  void park(Index node);
  void link_sibling(Index node);
  void unlink_sibling(Index node);
  uint32_t bucket_of(Index parent, int32_t token) const;
  void link_bucket(Index node);
  void unlink_bucket(Index node);
  void split_bucket();
  Index evict_oldest();
  void drop_dependent(Index node);

  const uint32_t capacity_;
  std::unique_ptr<Node[]> nodes_;     // capacity + 1; the root first
  std::unique_ptr<Index[]> buckets_;  // by (parent, token); linear hashing, so it grows one bucket at a time
  uint32_t num_buckets_ = 0;
  uint32_t bucket_base_ = 0;  // largest power of two <= num_buckets_
  Index first_unused_ = 1;    // nodes from here on were not used since the last clear()
  uint32_t num_nodes_ = 0;
  uint64_t num_evictions_ = 0;
};

}  // namespace jaxserve
