-- Forget that ranks have pools of a namespace; a rank that a newer incarnation has registered since is left alone.
--
-- KEYS[1] members, KEYS[2] their pools (see join_namespace.lua)
-- ARGV: member, incarnation, member, incarnation, ...
-- Returns how many left.

local left = 0
for i = 1, #ARGV, 2 do
  local member, incarnation = ARGV[i], ARGV[i + 1]
  local pools = redis.call('HGET', KEYS[2], member)
  if pools and string.match(pools, '^(%S*) ') == incarnation then
    redis.call('ZREM', KEYS[1], member)
    redis.call('HDEL', KEYS[2], member)
    left = left + 1
  end
end
return left
