-- Clear the claims of pools of pages that could not be read: T2 (at once, fenced by the page's generation, so
-- that a late report cannot clear a newer claim), with a note that says why and when, and a negative entry that
-- commit_pages.lua respects where the bytes may still look as if they were there.
--
-- KEYS  page keys 1..n, companion keys n+1..2n, note keys 2n+1..3n, then the counter of claims
-- ARGV[1] msgpack { claims = {{bit, shard_count, place in ARGV of the bitmap of missing shards, reason,
--                             whether the segment may be sick}, ...},
--                   fenced,
--                   forget_ms (generation of a page without claims, companions), note_ms, negative_ms }
-- ARGV[2] one generation byte a page where fenced; ARGV[3..] bitmaps
-- Returns {claims cleared, pages whose generation was another}
--
-- A generation is never 0 again: 0 means that nothing of this page was ever cleared, so that a commit need not
-- look for a negative entry.

local call = cmsgpack.unpack(ARGV[1])
local n = (#KEYS - 1) / 3
local lost = {}
local bor, band, bnot, rshift, lshift = bit.bor, bit.band, bit.bnot, bit.rshift, bit.lshift
local clock = redis.call('TIME')
local now, now_ms = clock[1], clock[1] * 1000 + math.floor(clock[2] / 1000)
for _, claim in ipairs(call.claims) do claim[3] = ARGV[claim[3]] end

local function minus(a, b)
  local out, empty = {}, true
  for i = 1, #a do
    local left = band(string.byte(a, i), bnot(string.byte(b, i) or 0))
    if left ~= 0 then empty = false end
    out[i] = string.char(left)
  end
  return table.concat(out), empty
end

local function all_shards(count)
  local out, left = {}, count
  while left > 0 do
    out[#out + 1] = string.char(left >= 8 and 255 or lshift(1, left) - 1)
    left = left - 8
  end
  return table.concat(out)
end

local function union(a, b)
  local out = {}
  for i = 1, math.max(#a, #b) do out[i] = string.char(bor(string.byte(a, i) or 0, string.byte(b, i) or 0)) end
  return table.concat(out)
end

local function refuse_commits(note, b, gone)
  local entry = redis.call('HGET', note, 'n' .. b)
  if entry then
    local ends, before = string.match(entry, '^(%d+) (.*)$')
    if tonumber(ends) > now_ms then gone = union(gone, before) end
  end
  redis.call('HSET', note, 'n' .. b, string.format('%.0f ', now_ms + call.negative_ms) .. gone)
end

local cleared, stale = 0, 0
for i = 1, n do
  local value = redis.call('GET', KEYS[i])
  local bytes = value and {string.byte(value, 1, -1)} or {0}
  local companion, note = KEYS[n + i], KEYS[2 * n + i]
  if call.fenced and bytes[1] ~= string.byte(ARGV[2], i) then
    stale = stale + 1
  else
    local dirty = false
    for _, claim in ipairs(call.claims) do
      local b, shard_count, gone, reason, sick = unpack(claim, 1, 5)
      local at, mask = 2 + rshift(b, 3), lshift(1, band(b, 7))
      local whole = band(bytes[at] or 0, mask) ~= 0
      local stored = whole and all_shards(shard_count) or redis.call('HGET', companion, b)
      local left, empty = '', true
      if stored then left, empty = minus(stored, gone) end
      if stored and left ~= stored then
        if whole then
          bytes[at] = band(bytes[at], bnot(mask))
          lost[b] = (lost[b] or 0) + 1
        end
        if empty then
          redis.call('HDEL', companion, b)
        else
          redis.call('HSET', companion, b, left)
          redis.call('PEXPIRE', companion, call.forget_ms)
        end
        redis.call('HSET', note, b, reason .. ' ' .. now .. ' ' .. gone)
        if sick and call.negative_ms > 0 then refuse_commits(note, b, gone) end
        redis.call('PEXPIRE', note, call.note_ms)
        cleared = cleared + 1
        dirty = true
      end
    end
    if dirty then
      bytes[1] = bytes[1] % 255 + 1
      local any = 0
      for k = 2, #bytes do any = bor(any, bytes[k]) end
      redis.call('SET', KEYS[i], string.char(unpack(bytes)))
      if any == 0 then redis.call('PEXPIRE', KEYS[i], call.forget_ms) end
    end
  end
end
for b, pages in pairs(lost) do redis.call('HINCRBY', KEYS[#KEYS], b, -pages) end
return {cleared, stale}
