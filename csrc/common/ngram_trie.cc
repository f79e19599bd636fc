#include "common/ngram_trie.h"

#include <algorithm>

#include "common/check.h"

namespace jaxserve {
namespace {

constexpr int64_t kMaxDepth = 256;
constexpr int64_t kTokensPerLock = 1024;  // of append; some milliseconds
// Of a node with more children, kProb compares the most recently seen ones: a continuation that is not among the last
// 64 different ones has a probability not worth a draft, and a common word has tens of thousands.
constexpr int kChildrenCompared = 64;

NgramTrie::Options checked(const NgramTrie::Options& options) {
  const auto check = [](bool holds, const std::string& wanted, const std::string& got) {
    JAXSERVE_CHECK(holds, "NgramTrie", "wanted " + wanted + ", got " + got);
  };
  const auto& o = options;
  check(o.max_depth >= 2 && o.max_depth <= kMaxDepth, "max_depth 2 .. " + std::to_string(kMaxDepth),
        std::to_string(o.max_depth));
  check(o.max_match >= 1 && o.max_match < o.max_depth, "1 <= max_match < max_depth",
        "max_match " + std::to_string(o.max_match) + ", max_depth " + std::to_string(o.max_depth));
  check(o.min_breadth >= 1 && o.min_breadth <= o.max_breadth && o.max_breadth <= INT32_MAX,
        "1 <= min_breadth <= max_breadth",
        "min_breadth " + std::to_string(o.min_breadth) + ", max_breadth " + std::to_string(o.max_breadth));
  const int64_t smallest = o.max_depth * (o.max_depth + 1) / 2;
  check(o.capacity >= smallest && o.capacity < INT32_MAX,
        "a capacity of at least " + std::to_string(smallest) + " nodes, an n-gram of max_depth " +
            std::to_string(o.max_depth) + " with its parts, and below 2^31",
        std::to_string(o.capacity));
  check(o.mode == "bfs" || o.mode == "prob", "mode \"bfs\" or \"prob\"", '"' + o.mode + '"');
  return options;
}

void check_tokens(const char* operation, const int32_t* tokens, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    JAXSERVE_CHECK(tokens[i] >= 0, operation,
                   "wanted token ids from 0, got " + std::to_string(tokens[i]) + " at position " + std::to_string(i));
  }
}

}  // namespace

NgramTrie::NgramTrie(const Options& options)
    : max_depth_(checked(options).max_depth),
      max_match_(options.max_match),
      min_breadth_(options.min_breadth),
      max_breadth_(options.max_breadth),
      mode_(options.mode == "bfs" ? Mode::kBfs : Mode::kProb),
      nodes_(options.capacity) {}

// -- append ------------------------------------------------------------------------------------------------------------

void NgramTrie::append(const int32_t* tokens, int64_t length, int64_t num_new) {
  JAXSERVE_CHECK(num_new >= 0 && num_new <= length, "NgramTrie.append",
                 "wanted num_new 0 .. " + std::to_string(length) + ", the length of the context, got " +
                     std::to_string(num_new));
  const int64_t reach = max_depth_ - 1;
  check_tokens("NgramTrie.append", tokens, std::max<int64_t>(0, length - num_new - reach), length);
  for (int64_t done = length - num_new; done < length;) {
    const int64_t begin = std::max<int64_t>(0, done - reach);
    const int64_t end = std::min(done + kTokensPerLock, length);
    std::lock_guard<std::mutex> lock(mutex_);
    append_locked(tokens + begin, done - begin, end - begin);
    done = end;
  }
}

void NgramTrie::append_locked(const int32_t* tokens, int64_t num_old, int64_t length) {
  Index longest = NgramNodes::kRoot;
  for (int64_t i = 0; i < length; ++i) {
    const bool is_new = i >= num_old;
    // Old tokens are stored, unless they were never appended or have been evicted.
    const Index known = is_new ? NgramNodes::kRoot : nodes_.child(longest, tokens[i]);
    longest = known != NgramNodes::kRoot ? known : extend_locked(longest, tokens[i], is_new);
  }
}

// Stores `longest` and all its suffixes with `token` behind; returns the longest of these that can be extended in turn.
NgramTrie::Index NgramTrie::extend_locked(Index longest, int32_t token, bool is_new) {
  chain_.clear();
  for (Index node = longest; node != NgramNodes::kRoot; node = nodes_.suffix(node)) chain_.push_back(node);
  chain_.push_back(NgramNodes::kRoot);
  nodes_.pin(longest);
  Index suffix = NgramNodes::kRoot;
  Index extended = NgramNodes::kRoot;
  // Shortest first: each is the suffix of the next.
  for (auto parent = chain_.rbegin(); parent != chain_.rend(); ++parent) {
    extended = nodes_.child(*parent, token);
    if (extended == NgramNodes::kRoot) extended = nodes_.add(*parent, token, suffix);
    if (is_new) nodes_.see(extended);
    suffix = extended;
  }
  nodes_.unpin(longest);
  return chain_.size() == static_cast<std::size_t>(max_depth_) ? nodes_.suffix(extended) : extended;
}

// -- match -------------------------------------------------------------------------------------------------------------

NgramTrie::Match NgramTrie::match(const int32_t* context, int64_t length, int32_t num_drafts, int32_t* tokens,
                                  int32_t* parents) {
  JAXSERVE_CHECK(num_drafts >= 0, "NgramTrie.match", "wanted num_nodes from 0, got " + std::to_string(num_drafts));
  check_tokens("NgramTrie.match", context, std::max<int64_t>(0, length - max_match_), length);
  std::lock_guard<std::mutex> lock(mutex_);
  drafts_.assign(1, Draft{});
  int32_t match_length = 0;
  int32_t suffix_length = 0;
  Index anchor = longest_suffix_locked(context, length, &suffix_length);
  for (; anchor != NgramNodes::kRoot; anchor = nodes_.suffix(anchor), --suffix_length) {
    // The end of the context is usually stored, and nothing has followed it yet.
    if (nodes_.first_child(anchor) == NgramNodes::kRoot) continue;
    match_length = std::max(match_length, suffix_length);
    if (drafts_.size() > static_cast<std::size_t>(num_drafts)) break;
    grow_locked(anchor, num_drafts, tokens, parents);
  }
  return Match{static_cast<int32_t>(drafts_.size()) - 1, match_length};
}

NgramTrie::Index NgramTrie::longest_suffix_locked(const int32_t* context, int64_t length,
                                                  int32_t* suffix_length) const {
  Index node = NgramNodes::kRoot;
  int32_t depth = 0;
  for (int64_t i = std::max<int64_t>(0, length - max_match_); i < length; ++i) {
    Index longer = nodes_.child(node, context[i]);
    while (longer == NgramNodes::kRoot && node != NgramNodes::kRoot) {
      node = nodes_.suffix(node);
      --depth;
      longer = nodes_.child(node, context[i]);
    }
    if (longer == NgramNodes::kRoot) continue;
    node = longer;
    ++depth;
  }
  *suffix_length = depth;
  return node;
}

// Merges what followed `anchor` into the draft tree.
void NgramTrie::grow_locked(Index anchor, int32_t num_drafts, int32_t* tokens, int32_t* parents) {
  candidates_.clear();
  first_candidate_ = 0;
  num_found_ = 0;
  find_candidates_locked(0, anchor, 1.0);
  while (first_candidate_ < candidates_.size()) {
    const Candidate best = take_candidate();
    const int32_t token = nodes_.token(best.node);
    int32_t drafted = drafted_child(best.parent, token);
    if (drafted == 0) {
      if (drafts_.size() > static_cast<std::size_t>(num_drafts)) return;
      drafted = static_cast<int32_t>(drafts_.size());
      tokens[drafted - 1] = token;
      parents[drafted - 1] = best.parent;
      Draft& parent = drafts_[best.parent];
      const Draft draft{token, parent.level + 1, 0, 0, parent.first_child};
      ++parent.num_children;
      parent.first_child = drafted;
      drafts_.push_back(draft);
    }
    nodes_.use(best.node);  // while it stays, so do all n-grams walked to find it
    find_candidates_locked(drafted, best.node, best.probability);
  }
}

// Enters the children of `node`, which stands for draft `parent`.
void NgramTrie::find_candidates_locked(int32_t parent, Index node, double probability) {
  choose_children_locked(parent, node);
  const double occurrences = std::max<uint32_t>(1, nodes_.count(node));
  for (const Index child : chosen_) {
    // A node evicted and added again can have fewer occurrences than its children.
    const double share = mode_ == Mode::kBfs ? 1.0 : std::min(1.0, nodes_.count(child) / occurrences);
    candidates_.push_back(Candidate{parent, child, probability * share, num_found_++});
    if (mode_ == Mode::kProb) std::push_heap(candidates_.begin(), candidates_.end(), is_worse);
  }
}

// Into chosen_: the children that are drafted already, which shorter suffixes may lengthen, then the best of the others
// for which the breadth leaves room.
void NgramTrie::choose_children_locked(int32_t parent, Index node) {
  chosen_.clear();
  const Draft& draft = drafts_[parent];
  for (int32_t sibling = draft.first_child; sibling != 0; sibling = drafts_[sibling].next_sibling) {
    const Index child = nodes_.child(node, drafts_[sibling].token);
    if (child != NgramNodes::kRoot) chosen_.push_back(child);
  }
  const auto num_drafted = static_cast<std::ptrdiff_t>(chosen_.size());
  const auto room = static_cast<std::ptrdiff_t>(std::max(0, breadth(draft.level) - draft.num_children));
  const std::ptrdiff_t most = mode_ == Mode::kBfs ? room : std::max<std::ptrdiff_t>(room, kChildrenCompared);
  Index child = nodes_.first_child(node);
  for (std::ptrdiff_t others = 0; others < most && child != NgramNodes::kRoot; child = nodes_.next_sibling(child)) {
    if (drafted_child(parent, nodes_.token(child)) != 0) continue;
    chosen_.push_back(child);
    ++others;
  }
  if (mode_ == Mode::kBfs) return;
  std::stable_sort(chosen_.begin() + num_drafted, chosen_.end(),
                   [this](Index a, Index b) { return nodes_.count(a) > nodes_.count(b); });
  const auto kept = static_cast<std::size_t>(num_drafted + room);
  if (chosen_.size() > kept) chosen_.resize(kept);
}

NgramTrie::Candidate NgramTrie::take_candidate() {
  if (mode_ == Mode::kBfs) return candidates_[first_candidate_++];
  std::pop_heap(candidates_.begin(), candidates_.end(), is_worse);
  const Candidate best = candidates_.back();
  candidates_.pop_back();
  return best;
}

bool NgramTrie::is_worse(const Candidate& a, const Candidate& b) {
  return a.probability != b.probability ? a.probability < b.probability : a.order > b.order;
}

int32_t NgramTrie::drafted_child(int32_t parent, int32_t token) const {
  int32_t draft = drafts_[parent].first_child;
  while (draft != 0 && drafts_[draft].token != token) draft = drafts_[draft].next_sibling;
  return draft;
}

int32_t NgramTrie::breadth(int32_t level) const {
  if (mode_ == Mode::kProb) return max_breadth_;
  return std::max(min_breadth_, level < 31 ? max_breadth_ >> level : 0);
}

// -- the rest ----------------------------------------------------------------------------------------------------------

uint32_t NgramTrie::count(const int32_t* tokens, int64_t length) {
  check_tokens("NgramTrie.count", tokens, 0, length);
  std::lock_guard<std::mutex> lock(mutex_);
  Index node = NgramNodes::kRoot;
  for (int64_t i = 0; i < length; ++i) {
    node = nodes_.child(node, tokens[i]);
    if (node == NgramNodes::kRoot) return 0;
  }
  return nodes_.count(node);
}

void NgramTrie::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  nodes_.clear();
}

void NgramTrie::check_integrity() {
  std::lock_guard<std::mutex> lock(mutex_);
  nodes_.check_integrity(max_depth_);
}

int64_t NgramTrie::num_nodes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return nodes_.num_nodes();
}

int64_t NgramTrie::num_evictions() {
  std::lock_guard<std::mutex> lock(mutex_);
  return nodes_.num_evictions();
}

}  // namespace jaxserve
