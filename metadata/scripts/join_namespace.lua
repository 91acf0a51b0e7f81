-- Note that a rank has pools of a namespace, until its lease ends, and count the engines that have each.
--
-- KEYS[1] members: 'engine/rank' by the end of their lease; KEYS[2] their pools: 'engine/rank' ->
--         'incarnation id id ...'
-- ARGV: member, end of its lease, incarnation, seconds that an ended lease is remembered; then its pool ids
-- Returns per pool id how many engines have it now.

local now = tonumber(redis.call('TIME')[1])
local ids = {unpack(ARGV, 5)}
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[4])) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('HDEL', KEYS[2], gone)
end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3] .. ' ' .. table.concat(ids, ' '))

local wanted, engines = {}, {}
for i, id in ipairs(ids) do wanted[id], engines[i] = i, 0 end
local seen = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')) do
  local engine = string.match(member, '^(.*)/')
  local pools = string.match(redis.call('HGET', KEYS[2], member) or '', ' (.*)$') or ''
  for id in string.gmatch(pools, '%S+') do
    local mark = engine .. ' ' .. id
    if wanted[id] and not seen[mark] then
      seen[mark] = true
      engines[wanted[id]] = engines[wanted[id]] + 1
    end
  end
end
return engines
