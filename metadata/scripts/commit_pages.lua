-- Claim pools of pages: O2 (the index learns of a page last, a sidecar never before its anchor) and H4 (a page
-- counts as present only when every shard of the variant is stored), in one step per page.
--
-- KEYS  page keys 1..n, companion keys n+1..2n, then the counter of claims (bit -> complete pages)
-- ARGV[1] msgpack {
--   bits      bits whose every shard is in this commit
--   partial   {bit, shard_count, place in ARGV of the bitmap of committed shards} of the others
--   anchors   {bit, place in ARGV of the bitmap of the caller's shards}: stored before or here
--   guarded   {bit -> true} of the sidecars that wait for the anchors
--   sharded   whether a pool of `bits` has several shards
--   companion_ms   life of a companion
-- }
-- ARGV[2..] bitmaps (the msgpack of Redis knows no binary type)
-- Returns {pages with at least one claim accepted, pages whose named pools are complete, indices (from 0) of
-- pages whose guarded pools were rejected}.

local call = cmsgpack.unpack(ARGV[1])
local n = (#KEYS - 1) / 2
local claims = KEYS[#KEYS]
local gained = {}
local bor, band, rshift, lshift = bit.bor, bit.band, bit.rshift, bit.lshift

local function has_bit(bytes, b)
  return band(bytes[2 + rshift(b, 3)] or 0, lshift(1, band(b, 7))) ~= 0
end

local function set_bit(bytes, b)
  local at = 2 + rshift(b, 3)
  for i = #bytes + 1, at do bytes[i] = 0 end
  bytes[at] = bor(bytes[at], lshift(1, band(b, 7)))
  gained[b] = (gained[b] or 0) + 1
end

local function union(a, b)
  if not a then return b end
  local out = {}
  for i = 1, math.max(#a, #b) do
    out[i] = string.char(bor(string.byte(a, i) or 0, string.byte(b, i) or 0))
  end
  return table.concat(out)
end

local function covers(a, b)
  if not a then return false end
  for i = 1, #b do
    local want = string.byte(b, i)
    if band(string.byte(a, i) or 0, want) ~= want then return false end
  end
  return true
end

local popcount = {}
for i = 0, 255 do
  local c, x = 0, i
  while x > 0 do c = c + band(x, 1); x = rshift(x, 1) end
  popcount[i] = c
end

local function count(bitmap)
  local c = 0
  for i = 1, #bitmap do c = c + popcount[string.byte(bitmap, i)] end
  return c
end

local full_here, partial_here = {}, {}
for _, b in ipairs(call.bits) do full_here[b] = true end
for _, p in ipairs(call.partial) do
  p[3] = ARGV[p[3]]
  partial_here[p[1]] = p[3]
end
for _, a in ipairs(call.anchors) do a[2] = ARGV[a[2]] end

local function anchors_stored(bytes, companion)
  for _, a in ipairs(call.anchors) do
    local b, mine = a[1], a[2]
    if not (full_here[b] or has_bit(bytes, b)) then
      local stored = redis.call('HGET', companion, b) or nil
      if partial_here[b] then stored = union(stored, partial_here[b]) end
      if not covers(stored, mine) then return false end
    end
  end
  return true
end

local function add_partial(bytes, companion, p)
  local b, shard_count, bitmap = p[1], p[2], p[3]
  if has_bit(bytes, b) then return true, false end
  local stored = union(redis.call('HGET', companion, b) or nil, bitmap)
  if count(stored) == shard_count then
    redis.call('HDEL', companion, b)
    set_bit(bytes, b)
    return true, true
  end
  redis.call('HSET', companion, b, stored)
  redis.call('PEXPIRE', companion, call.companion_ms)
  return false, false
end

local committed, complete, rejected = 0, 0, {}
for i = 1, n do
  local value = redis.call('GET', KEYS[i])
  local bytes = value and {string.byte(value, 1, -1)} or {0}
  local companion = KEYS[n + i]
  local dirty = false
  local open = #call.anchors == 0 or anchors_stored(bytes, companion)
  if not open then rejected[#rejected + 1] = i - 1 end
  local accepted, all_complete = 0, true
  for _, b in ipairs(call.bits) do
    if open or not call.guarded[b] then
      accepted = accepted + 1
      if not has_bit(bytes, b) then set_bit(bytes, b); dirty = true end
      if call.sharded then redis.call('HDEL', companion, b) end
    end
  end
  for _, p in ipairs(call.partial) do
    if open or not call.guarded[p[1]] then
      accepted = accepted + 1
      local done, changed = add_partial(bytes, companion, p)
      all_complete = all_complete and done
      dirty = dirty or changed
    end
  end
  if accepted > 0 then
    committed = committed + 1
    if all_complete and open then complete = complete + 1 end
    -- A page that lost its last claim keeps its generation for an hour only; SET takes that limit off again.
    if dirty then redis.call('SET', KEYS[i], string.char(unpack(bytes))) end
  end
end
for b, pages in pairs(gained) do redis.call('HINCRBY', claims, b, pages) end
return {committed, complete, rejected}
