-- Claim pools of pages: O2 (the index learns of a page last, a sidecar never before its anchor), H4 (a page counts
-- as present only when every shard of the variant is stored) and T2's negative entry, in one step.
--
-- The negative entry: after a claim was cleared because its bytes timed out, a commit of the same
-- shards of the same pool of that page is refused for some seconds. A writer cannot know better: on a segment
-- whose node died a put of an existing key answers "done", and "exists" says yes for a while, so that the claim
-- would come back at once and the next reader would wait for a time-out again. Other shards are not refused.
--
-- KEYS  page keys 1..n, then with `kinds` >= 2 companion keys, with `kinds` = 3 note keys, then the counter of
--       claims (bit -> complete pages)
-- ARGV[1] msgpack {
--   kinds     how many kinds of keys are there besides the counter
--   bits      bits whose every shard is in this commit
--   partial   {bit, shard_count, place in ARGV of the bitmap of committed shards} of the others
--   anchors   {bit, place in ARGV of the bitmap of the caller's shards}: stored before or here
--   guarded   {bit -> true} of the sidecars that wait for the anchors
--   sharded   whether a pool of `bits` has several shards
--   companion_ms   life of a companion
-- }
-- ARGV[2..] bitmaps (the msgpack of Redis knows no binary type)
-- Returns {pages with at least one claim accepted, pages whose named pools are complete,
--          indices (from 0) of pages whose guarded pools were rejected,
--          index, bit, index, bit, ... of negative entries,
--          indices of pages that are untouched: a claim of theirs was once cleared, so send them with note keys}

local call = cmsgpack.unpack(ARGV[1])
local n = (#KEYS - 1) / call.kinds
local claims = KEYS[#KEYS]
local gained = {}
local bor, band, rshift, lshift = bit.bor, bit.band, bit.rshift, bit.lshift
local byte, char = string.byte, string.char

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
  for i = 1, math.max(#a, #b) do out[i] = char(bor(byte(a, i) or 0, byte(b, i) or 0)) end
  return table.concat(out)
end

local function covers(a, b)
  if not a then return false end
  for i = 1, #b do
    local want = byte(b, i)
    if band(byte(a, i) or 0, want) ~= want then return false end
  end
  return true
end

local function overlap(a, b)
  for i = 1, math.min(#a, #b) do
    if band(byte(a, i), byte(b, i)) ~= 0 then return true end
  end
  return false
end

local popcount = {}
for i = 0, 255 do
  local c, x = 0, i
  while x > 0 do c = c + band(x, 1); x = rshift(x, 1) end
  popcount[i] = c
end

local function count(bitmap)
  local c = 0
  for i = 1, #bitmap do c = c + popcount[byte(bitmap, i)] end
  return c
end

local full_here, partial_here = {}, {}
for _, b in ipairs(call.bits) do full_here[b] = true end
for _, p in ipairs(call.partial) do
  p[3] = ARGV[p[3]]
  partial_here[p[1]] = p[3]
end
for _, a in ipairs(call.anchors) do a[2] = ARGV[a[2]] end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function sick_bits(note)
  local sick = {}
  local function look(b, mine)
    local entry = redis.call('HGET', note, 'n' .. b)
    if entry then
      local ends, gone = string.match(entry, '^(%d+) (.*)$')
      if tonumber(ends) > now and (not mine or overlap(gone, mine)) then sick[b] = true end
    end
  end
  for _, b in ipairs(call.bits) do look(b) end
  for _, p in ipairs(call.partial) do look(p[1], p[3]) end
  return sick
end

local function anchors_stored(bytes, companion, sick)
  for _, a in ipairs(call.anchors) do
    local b, mine = a[1], a[2]
    if not ((full_here[b] and not sick[b]) or has_bit(bytes, b)) then
      local stored = redis.call('HGET', companion, b) or nil
      if partial_here[b] and not sick[b] then stored = union(stored, partial_here[b]) end
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

local values = redis.call('MGET', unpack(KEYS, 1, n))
local committed, complete, rejected, negative, untouched, write = 0, 0, {}, {}, {}, {}
local nothing = {}

local function commit(i, bytes)
  local companion, dirty = KEYS[n + i], false
  local sick = bytes[1] ~= 0 and sick_bits(KEYS[2 * n + i]) or nothing
  local open = #call.anchors == 0 or anchors_stored(bytes, companion, sick)
  if not open then rejected[#rejected + 1] = i - 1 end
  local accepted, all_complete = 0, open
  local function refused(b)
    if sick[b] then
      negative[#negative + 1] = i - 1
      negative[#negative + 1] = b
      all_complete = false
      return true
    end
    return not open and call.guarded[b]
  end
  for _, b in ipairs(call.bits) do
    if not refused(b) then
      accepted = accepted + 1
      if not has_bit(bytes, b) then set_bit(bytes, b); dirty = true end
      if call.sharded then redis.call('HDEL', companion, b) end
    end
  end
  for _, p in ipairs(call.partial) do
    if not refused(p[1]) then
      accepted = accepted + 1
      local done, changed = add_partial(bytes, companion, p)
      all_complete = all_complete and done
      dirty = dirty or changed
    end
  end
  if accepted > 0 then
    committed = committed + 1
    if all_complete then complete = complete + 1 end
    if dirty then
      write[#write + 1] = KEYS[i]
      write[#write + 1] = char(unpack(bytes))
    end
  end
end

-- Where no shards are counted and nothing waits for an anchor, what becomes of a page depends on its value alone,
-- and most pages of a call have the same: each value is worked out once.
local function commit_whole()
  local same = {}
  for i = 1, n do
    local value = values[i] or ''
    local after = same[value]
    if not after then
      local bytes = value == '' and {0} or {byte(value, 1, -1)}
      after = {touched = bytes[1] == 0, pages = 0, gains = {}}
      if after.touched then
        for _, b in ipairs(call.bits) do
          if not has_bit(bytes, b) then
            set_bit(bytes, b)
            after.gains[#after.gains + 1] = b
            gained[b] = gained[b] - 1
          end
        end
        if #after.gains > 0 then after.value = char(unpack(bytes)) end
      end
      same[value] = after
    end
    if after.touched then
      after.pages = after.pages + 1
      if after.value then
        local at = #write
        write[at + 1], write[at + 2] = KEYS[i], after.value
      end
    else
      untouched[#untouched + 1] = i - 1
    end
  end
  for _, after in pairs(same) do
    committed = committed + after.pages
    for _, b in ipairs(after.gains) do gained[b] = gained[b] + after.pages end
  end
  complete = committed
end

local function commit_each()
  for i = 1, n do
    local bytes = values[i] and {byte(values[i], 1, -1)} or {0}
    if bytes[1] ~= 0 and call.kinds < 3 then
      untouched[#untouched + 1] = i - 1
    else
      commit(i, bytes)
    end
  end
end

if call.kinds == 1 then commit_whole() else commit_each() end
-- A page that lost its last claim keeps its generation for a time only; MSET takes that limit off again.
if #write > 0 then redis.call('MSET', unpack(write)) end
for b, pages in pairs(gained) do redis.call('HINCRBY', claims, b, pages) end
return {committed, complete, rejected, negative, untouched}
