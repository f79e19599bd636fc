// Drafts by looking up what followed the last tokens before: the n-gram trie of speculative decoding.
//
// append() stores the n-grams of a text, match() finds the longest suffix of a context that something followed, and
// drafts what followed as a tree. Any thread may call anything; one mutex guards all.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "common/ngram_nodes.h"

namespace jaxserve {

class NgramTrie {
 public:
  enum class Mode {
    kBfs,   // level by level, most recently seen first, each level half as wide as the one above
    kProb,  // most probable path first, by occurrences
  };

  struct Options {
    int64_t capacity;     // most nodes
    int64_t max_depth;    // tokens of the longest stored n-gram
    int64_t max_match;    // tokens of the longest suffix looked up
    int64_t min_breadth;  // most children of a drafted node: at the deep levels of kBfs ...
    int64_t max_breadth;  // ... and at its first level; at every level of kProb
    std::string mode;     // "bfs" or "prob"
  };

  struct Match {
    int32_t num_drafts;
    int32_t match_length;  // tokens of the longest suffix that something followed; 0: none
  };

  // Raises NativeError unless 1 <= max_match < max_depth <= 256, 1 <= min_breadth <= max_breadth, the mode is known
  // and the capacity holds an n-gram of max_depth tokens with all its parts: max_depth * (max_depth + 1) / 2 nodes.
  explicit NgramTrie(const Options& options);

  // Stores every n-gram of at most max_depth tokens that ends in one of the last num_new of `length` tokens. Reads at
  // most max_depth - 1 tokens before those. O(num_new * max_depth). A long text gives way to other calls in between.
  // Raises NativeError, and stores nothing, if a token is negative or num_new is not in 0 .. length.
  void append(const int32_t* tokens, int64_t length, int64_t num_new);

  // Drafts at most num_drafts tokens to follow the context, into `tokens` and `parents` [num_drafts]. Draft i is node
  // i + 1 of the tree; its parent is an earlier node, 0 being the root, the last token of the context. Shorter suffixes
  // fill what longer ones leave free, and lengthen their drafts. Raises NativeError if a token it looks up is negative.
  Match match(const int32_t* context, int64_t length, int32_t num_drafts, int32_t* tokens, int32_t* parents);

  // Occurrences of the n-gram that append() has seen since it was last added; 0 if it is not stored.
  uint32_t count(const int32_t* tokens, int64_t length);

  // Forgets all n-grams; the number of evictions goes on.
  void clear();
  void check_integrity();

  int64_t num_nodes();
  int64_t num_evictions();
  int64_t capacity() const { return nodes_.capacity(); }

 private:
  using Index = NgramNodes::Index;

  // A node of the draft tree; the first is the root. Its children are chained from first_child, 0 ends.
  struct Draft {
    int32_t token;
    int32_t level;
    int32_t num_children;
    int32_t first_child;
    int32_t next_sibling;
  };
  // A trie node whose token may be drafted below `parent`.
  struct Candidate {
    int32_t parent;
    Index node;
    double probability;  // of the path from the root
    int64_t order;       // decides between equal ones: the earlier found
  };

  void append_locked(const int32_t* tokens, int64_t num_old, int64_t length);
  Index extend_locked(Index longest, int32_t token, bool is_new);
  Index longest_suffix_locked(const int32_t* context, int64_t length, int32_t* suffix_length) const;
  void grow_locked(Index anchor, int32_t num_drafts, int32_t* tokens, int32_t* parents);
  void find_candidates_locked(int32_t parent, Index node, double probability);
  void choose_children_locked(int32_t parent, Index node);
  Candidate take_candidate();
  int32_t drafted_child(int32_t parent, int32_t token) const;
  int32_t breadth(int32_t level) const;
  static bool is_worse(const Candidate& a, const Candidate& b);

  const int32_t max_depth_;
  const int32_t max_match_;
  const int32_t min_breadth_;
  const int32_t max_breadth_;
  const Mode mode_;
  std::mutex mutex_;
  NgramNodes nodes_;  // guarded by mutex_, as is all below

  // Kept between calls for their memory.
  std::vector<Index> chain_;           // of append: the n-grams that the next token extends, longest first
  std::vector<Draft> drafts_;          // of match: the tree so far
  std::vector<Candidate> candidates_;  // of match: kBfs a queue from first_candidate_ on, kProb a heap
  std::vector<Index> chosen_;          // of match
  std::size_t first_candidate_ = 0;
  int64_t num_found_ = 0;
};

}  // namespace jaxserve
