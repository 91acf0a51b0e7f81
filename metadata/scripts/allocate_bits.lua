-- Give each pool variant of a namespace its bit of the page index, once and for ever, and note which shards
-- some rank has registered (P4).
--
-- KEYS[1] variants: pool id -> JSON {bit, ...}; KEYS[2] shards: pool id -> bitmap; KEYS[3] identity
-- ARGV[1] identity; ARGV[2] most variants; then per pool: id, JSON description, bitmap of the rank's shards
-- Returns {'ok', bit, ...}, or {'full', variants there}, or {'collision', id} and changes nothing.

local known, other = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #other, 2 do known[other[i]] = cjson.decode(other[i + 1]) end
local next_bit, added = #other / 2, 0
for i = 3, #ARGV, 3 do
  local id = ARGV[i]
  if not known[id] then
    added = added + 1
  elseif known[id].digest ~= cjson.decode(ARGV[i + 1]).digest then
    return {'collision', id}
  end
end
if next_bit + added > tonumber(ARGV[2]) then return {'full', next_bit} end

redis.call('SET', KEYS[3], ARGV[1])
local bits = {'ok'}
for i = 3, #ARGV, 3 do
  local id = ARGV[i]
  if not known[id] then
    local record = cjson.decode(ARGV[i + 1])
    record.bit = next_bit
    known[id] = record
    redis.call('HSET', KEYS[1], id, cjson.encode({bit = next_bit, digest = record.digest, pool = record.pool}))
    next_bit = next_bit + 1
  end
  bits[#bits + 1] = known[id].bit
  local old, mine, out = redis.call('HGET', KEYS[2], id) or '', ARGV[i + 2], {}
  for k = 1, math.max(#old, #mine) do
    out[k] = string.char(bit.bor(string.byte(old, k) or 0, string.byte(mine, k) or 0))
  end
  redis.call('HSET', KEYS[2], id, table.concat(out))
end
return bits
